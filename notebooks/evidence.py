# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live

# %% tags=["hide-input"]
from kvlib.study.evidence import run_evidence
from kvlib.study.stages import open_run

study = open_run(profile, run, results=results)
evidence = run_evidence(study)
