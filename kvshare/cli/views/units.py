"""Numbers as people read them. None is empty."""


def text(value: object) -> str:
    return "" if value is None else str(value)


def number(value: float | None, spec: str = ",") -> str:
    return "" if value is None else format(value, spec)


def counted(count: int | None, noun: str) -> str:
    return "" if count is None else f"{count:,} {noun}" + ("" if count == 1 else "s")


def percent(share: float | None, digits: int = 2) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return ""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def idle(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def ago(seconds: float | None) -> str:
    return "" if seconds is None else f"{idle(seconds)} ago"
