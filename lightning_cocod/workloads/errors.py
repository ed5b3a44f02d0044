"""The one exception for input that the user can mend."""


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line that names it and the way out."""

    def __str__(self) -> str:
        # A DataLoader worker's exception is raised again around its whole traceback, whose last line is the message.
        return super().__str__().rstrip().rpartition("\n")[2].removeprefix(f"{__name__}.{type(self).__name__}: ")
