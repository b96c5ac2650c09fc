"""What can go wrong. Every exception of this package is an `Error`."""


class Error(Exception):
    """Something failed; the text says what, and what to do about it."""


class UnreachableError(Error, ConnectionError):
    """No daemon (on a host) or agent (in a guest) answers. Trying again later may help."""


class NotFoundError(Error, LookupError):
    """No such device, or the operator's policy hides it."""


class DeniedError(Error, PermissionError):
    """This user may not connect, or the operator forbids the request."""


class FilterError(Error, ValueError):
    """The filter does not compile; the text is libpcap's."""


class InvalidError(Error, ValueError):
    """An argument is out of range."""


class LimitError(Error):
    """Not enough memory for the ring, or a limit of the daemon is reached."""


class FullError(Error, BlockingIOError):
    """The other side of a channel has not taken what was said before. Call `next`, then try again."""


class GoneError(Error):
    """The port is over: the host closed it, its source failed, or its ring was damaged."""


class ClosedError(Error, ValueError):
    """The port was closed by this program."""


class EndedError(Error, EOFError):
    """The source ended, and everything was read. Iterators stop instead of raising it."""


class LoanError(Error, BufferError):
    """Packets in the ring are still looked at, or are not there any more; or the port is in use."""
