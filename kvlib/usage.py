"""What is wrong with a command line, in one sentence: a command, an option or an argument that is not there."""

from typing import Any

from typer.core import TyperGroup

from kvlib.errors import KvlibError, suggestion


class Commands(TyperGroup):
    """The commands; one that is not among them is answered with the nearest that is."""

    def resolve_command(self, ctx, args: list[str]):
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            raise KvlibError(
                f"command {name!r} given, expected one of {', '.join(self.commands)}"
                f"{suggestion(name, self.commands)}; `python -m kvlib --help` says what each does"
            )
        return super().resolve_command(ctx, args)


def usage_sentence(error: Any) -> str:
    """A usage error of typer: what was given, what was expected, what to do."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    said = error.format_message().rstrip(".")
    if option and context is None:  # the parser knows no command: an option with a value too many or too few
        with_value = "does not take" in said
        return (
            f"option {option} given {'with a value, expected none: leave it out' if with_value else 'without a value, expected one: add it'}; "
            "the command's `--help` says what each option does"
        )
    if context is None:
        return f"{said}: correct the command; `python -m kvlib --help` explains what there is"
    program, explained = f"python -m {context.command_path}", f"`python -m {context.command_path} --help`"
    parameters = {name: p for p in context.command.params for name in (*p.opts, *p.secondary_opts)}
    parameter = getattr(error, "param", None)
    if option and option not in parameters:
        options = [name for name in parameters if name.startswith("-")] + ["--help"]
        return (
            f"option {option!r} given, expected one of {', '.join(options)}{suggestion(option, options)}; "
            f"{explained} says what each does"
        )
    if hasattr(error, "param_type"):  # something is missing
        name = _word(parameter)
        return f"`{program}` given without its {name}, expected {parameter.help or name}: add it, see {explained}"
    if parameter is not None:
        name = parameter.opts[-1] if parameter.opts[-1].startswith("-") else _word(parameter)
        return f"{name} is {_found(error)}: correct the value, see {explained}"
    words = [_word(p) for p in context.command.params if not p.opts[-1].startswith("-")]
    usage = " ".join([program, "[OPTIONS]", *words])
    return f"{said[:1].lower()}{said[1:]}, expected `{usage}`: correct the command, see {explained}"


def _found(error: Any) -> str:
    """What was given for a parameter, and what was expected."""
    entries = error.__cause__.errors() if hasattr(error.__cause__, "errors") else []
    if not entries:
        return f"not as expected ({error.message.rstrip('.')})"
    return f"{entries[0]['input']!r}, expected {entries[0]['msg'].removeprefix('Input should be ').partition(',')[0]}"


def _word(parameter: Any) -> str:
    """What a parameter's value is called in a usage line."""
    if parameter.metavar or not parameter.opts[-1].startswith("-"):
        return parameter.metavar or parameter.name.upper()
    return "VALUE"
