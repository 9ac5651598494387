"""
Commands of other distributions, which `kvshare` finds by their entry points in the group `kvshare.commands`.

An entry point names a `typer.Typer`. The metadata of what is installed is read only to list the commands, and
where none of ours has the name; their code is imported when one of them runs, so `kvshare --help` stays fast.
The commands of kvshare-lab are listed without it, too, and then say how to install it.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer._click import Command, Context  # as typer.core has them in its signatures
from typer.core import TyperCommand, TyperGroup

from kvshare.errors import MissingExtraError

GROUP = "kvshare.commands"
LAB = {
    "bench": "Measure: every published figure comes from one of these.",
    "calibrate": "Measure what reused KV costs a model, for the server's predictions.",
}
"""The commands of kvshare-lab by name, with what `kvshare --help` says of them."""


class CommandGroup(TyperGroup):
    """Our own commands and, after them, those of other distributions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in LAB:
            self.add_command(_Missing(name))

    def list_commands(self, ctx: Context) -> list[str]:
        return list(dict.fromkeys([*super().list_commands(ctx), *sorted(_entry_points())]))

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None and not isinstance(command, _Missing):
            return command
        entry_point = _entry_points().get(cmd_name)
        return command if entry_point is None else _Found(entry_point)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Return the command that is about to run: only now is code of another distribution imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, _Found) else command, rest


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {entry_point.name: entry_point for entry_point in entry_points(group=GROUP)}


class _Found(TyperCommand):
    """A command as `--help` lists it: its code is not imported yet."""

    def __init__(self, entry_point: EntryPoint) -> None:
        distribution = entry_point.dist
        of = "another distribution" if distribution is None else distribution.name
        super().__init__(entry_point.name, help=LAB.get(entry_point.name, f"A command of {of}."))
        self._entry_point, self._of = entry_point, of

    def load(self) -> Command:
        """Return the command itself. Raises MissingExtraError if it cannot be imported."""
        try:
            app: typer.Typer = self._entry_point.load()
        except ImportError as exc:
            raise MissingExtraError(
                f"`kvshare {self.name}` of {self._of} cannot be imported ({exc}): install {self._of} again"
            ) from exc
        return typer.main.get_command(app)


class _Missing(TyperCommand):
    """A command of kvshare-lab, which is not installed: whatever its arguments, it says so."""

    def __init__(self, name: str) -> None:
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(name, help=LAB[name], add_help_option=False, context_settings=settings)

    def invoke(self, ctx: Context) -> Any:
        raise MissingExtraError(
            f"`kvshare {self.name}` is a command of kvshare-lab, which is not installed: "
            "pip install ./lab in a checkout of KVShare"
        )
