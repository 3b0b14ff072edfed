"""Places in memory, and the threads that work begins at; for both planners."""

__all__ = ["Memory", "Turns"]


class Memory:
    """Assigns offsets, in floats, one after the other; all are multiples of 16 bytes."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.end = 0

    def reserve(self, floats: int) -> int:
        start, self.end = self.end, self.end + -(-floats // 4) * 4
        return start

    def place(self, name: str, floats: int) -> None:
        self.offsets[name] = self.reserve(floats)


class Turns:
    """Assigns first threads, so that work for few threads begins at different warps."""

    def __init__(self, threads: int) -> None:
        self._threads, self._next = threads, 0

    def __call__(self, wanted: int) -> int:
        first, self._next = self._next, (self._next + -(-wanted // 32) * 32) % self._threads
        return first
