"""What a run will download, keep, hold and compute, and how long that takes on a device, before any of it is done."""

from kvlib.study.plan.devices import Device, device_for, device_named
from kvlib.study.plan.making import Plan, make_plan, plan_run
from kvlib.study.plan.shapes import ModelShape, shape_of

__all__ = ["Device", "ModelShape", "Plan", "device_for", "device_named", "make_plan", "plan_run", "shape_of"]
