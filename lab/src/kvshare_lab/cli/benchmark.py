"""How a command of `kvshare bench` is declared. Nothing heavy: `kvshare bench --help` needs this."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from typer._coercion import resolve_type_descriptor  # what typer.core.TyperOption takes as a type
from typer.core import TyperOption
from typer.models import OptionInfo

EMBEDDED, SIMULATED, VLLM = "embedded", "simulated", "vllm"


class Option(TyperOption):
    """
    An option, by default with the flag --name; None where it is not given, unless it has a `default`.

    `kind`: int, float, str, bool, Path, an enum or a Literal
    `limits`: min and max, inclusive
    `engine`: the only one that has it
    """

    def __init__(
        self,
        name: str,
        kind: Any,
        help: str,
        *,
        engine: str | None = None,
        flag: str | None = None,
        default: Any = None,
        **limits: float,
    ) -> None:
        self.engine = engine
        super().__init__(
            param_decls=[name, flag or f"--{name.replace('_', '-')}"],
            type_descriptor=resolve_type_descriptor(kind, OptionInfo(**limits)),  # type: ignore[arg-type]
            is_flag=kind is bool,
            default=default,
            help=help,
            show_default=True,
            **limits,  # type: ignore[arg-type]
        )


class Runner(NamedTuple):
    """What measures: `run(**options)`, or with vLLM `run(config(**options))`."""

    run: Callable[..., Any]
    config: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A command. `engines`: the default one first. `load` imports what measures with an engine."""

    name: str
    help: str
    options: tuple[Option, ...]
    engines: tuple[str, ...]
    load: Callable[[str], Runner]


def benchmark(
    *options: Option, engines: tuple[str, ...] = (EMBEDDED,)
) -> Callable[[Callable[[str], Runner]], Benchmark]:
    """Makes a benchmark of its `load`, which has its name and, as docstring, its help."""

    def declared(load: Callable[[str], Runner]) -> Benchmark:
        return Benchmark(load.__name__, load.__doc__ or "", options, engines, load)

    return declared


vllm_benchmark = partial(benchmark, engines=(VLLM,))
