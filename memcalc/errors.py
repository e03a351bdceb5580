"""Every error that memcalc raises for its user.

```
MemcalcError              anything the user can put right; exit code 2
├── InputError            one field has a value that cannot be used
│   ├── UnknownNameError  a name of a preset, option or key that does not exist
│   ├── CombinationError  each field is fine alone, together they are impossible
│   │   └── UncountedError      or possible, and not modelled
│   ├── UnmodelledError   a model has parts, or images, that are not modelled
│   ├── AbsentError       a key that must be given is not there
│   ├── FileError         a file cannot be read: absent, too large, not UTF-8, truncated
│   │   └── UnknownFormatError  it is none of the formats that are read
│   │       └── FragmentError   it is a part of another script
│   └── IdleError         a file or command that starts no training
├── MissingError          the answer depends on something that the user must tell; exit code 3
│   └── ObjectiveError    what is trained is nothing that there are figures for; likewise
└── RestartNeeded         a guarded run must be started again with less memory; not a mistake of anyone's
```
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from typing import Self

_SHOWN_CHARS = 60
_MISSING = "is missing"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` most like `name`, case aside, or None when nothing is close.

    >>> nearest("lama-2-7b", ["llama-2-7b", "mixtral-8x7b"])
    'llama-2-7b'
    >>> nearest("a100", ["a10", "a100-80g", "a100-pcie-80g"])
    'a100-80g'
    >>> nearest("zebra", ["llama-2-7b"]) is None
    True
    """
    folded = {candidate.casefold(): candidate for candidate in names if candidate}
    wanted = name[:_SHOWN_CHARS].casefold()
    close = difflib.get_close_matches(wanted, list(folded), n=1, cutoff=0.6)
    begun = [key for key in folded if len(wanted) > 2 and key.startswith(wanted)]
    within = [key for key in folded if wanted and wanted in key]
    matches = next((group for group in (begun, close, within) if group), [])
    return folded[min(matches, key=lambda key: (len(key), key))] if matches else None


def shown(value: object) -> str:
    r"""Return `value` as a sentence can carry it: quoted, control characters escaped, cut to 60 characters.

    >>> print(shown("a\x1b[31m"))
    'a\x1b[31m'
    """
    if isinstance(value, str):
        return repr(cut(value))
    return cut(_text(value))


def cut(text: str) -> str:
    """Return a text as a sentence can carry it without quotes: in one line, its first 60 characters.

    >>> len(cut("a" * 5000)), cut("fsdp2"), cut("of  two   words")
    (61, 'fsdp2', 'of two words')
    """
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _path_shown(value: object) -> str:
    """Return a path cut at the left, because its end is what tells one file from another."""
    text = str(value)
    return shown(text if len(text) <= _SHOWN_CHARS else "…" + text[1 - _SHOWN_CHARS :])


def _text(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to print an int of more than 4300 digits
        return f"<{type(value).__name__}>"


class MemcalcError(Exception):
    """The base of all errors that a user can put right; the message is one sentence."""

    exit_code: int = 2


class InputError(MemcalcError):
    """A field has a value that cannot be used; says which, what is allowed, and the nearest right name.

    >>> print(InputError("optimizer", "adamww", "must be one of adamw, sgd", ["adamw", "sgd"]))
    optimizer 'adamww': must be one of adamw, sgd; did you mean 'adamw'?
    >>> print(InputError("tp", 3, "must divide the 32 heads"))
    tp 3: must divide the 32 heads.
    >>> print(InputError("gpu", "", "give --gpu"))
    gpu is missing: give --gpu.
    """

    def __init__(
        self, field: str, value: object, allowed: str, names: Iterable[str] = (), *, suggestion: str | None = None
    ) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        self.suggestion = suggestion or (nearest(value, names) if isinstance(value, str) else None)
        super().__init__(self.sentence())

    def within(self, what: str) -> Self:
        """Return the same error about a field of `what`, such as a file: the outermost stage adds this, once.

        >>> print(InputError("gpus", -1, "must be above 0").within("node preset mine"))
        node preset mine: gpus -1: must be above 0.
        """
        return type(self)(f"{what}: {self.field}", self.value, self.allowed, suggestion=self.suggestion)

    def sentence(self, options: Collection[str] = ()) -> str:
        """Return the sentence for who typed `options`, which are called as they were typed.

        >>> InputError("global_batch", 100, "must be a multiple of 8").sentence(["--global-batch"])
        '--global-batch 100: must be a multiple of 8.'
        """
        context, colon, field = self.field.rpartition(": ")
        option = f"--{field.replace('_', '-')}"
        subject = self._subject(option if option in options and not colon else field)
        text = f"{context}{colon}{subject}"
        allowed = self.allowed.rstrip(".")
        if subject.endswith(_MISSING):
            allowed = re.sub(r"^must be given(: |, |$)", "", allowed)
        text = f"{text}: {allowed}" if allowed else text
        return f"{text}; did you mean {self.suggestion!r}?" if self.suggestion else f"{text}."

    def _subject(self, field: str) -> str:
        return f"{field} {_MISSING}" if self.value in (None, "") else f"{field} {shown(self.value)}"


class UnknownNameError(InputError):
    """A name that nothing has: a preset, an option's value, a key of a file.

    >>> print(UnknownNameError("key", "hiden", "must be hidden or heads").within("model preset mine"))
    model preset mine: unknown key 'hiden': must be hidden or heads.
    """

    def _subject(self, field: str) -> str:
        return f"unknown {field.removeprefix('--')} {shown(self.value)}" if self.value else super()._subject(field)


class CombinationError(InputError):
    """Each field is fine alone, but together they are impossible."""


class UncountedError(CombinationError):
    """The fields are possible together, and are not modelled."""


class UnmodelledError(InputError):
    """A model has parts of which the parameters alone are known, or images where texts alone are modelled."""


class AbsentError(InputError):
    """A key that must be given is not there."""

    def _subject(self, field: str) -> str:
        return f"{field} {shown(self.value)} {_MISSING}"


class FileError(InputError):
    """A file cannot be used: absent, too large, not UTF-8, truncated, binary.

    >>> print(FileError("file", "x.json", "no such file"))
    file 'x.json': no such file.
    """

    def _subject(self, field: str) -> str:
        return f"{field} {_path_shown(self.value)}"


class UnknownFormatError(FileError):
    """A file is none of the formats that are read."""


class FragmentError(UnknownFormatError):
    """A script is a part of another one: it sets what that one runs with."""


class IdleError(InputError):
    """A file or a command starts no training."""


class MissingError(MemcalcError):
    """The answer depends on something unknown that only the user can tell; the message names it."""

    exit_code = 3


class ObjectiveError(MissingError):
    """What a file or a command trains is nothing that memcalc has figures for."""


class RestartNeeded(MemcalcError):  # noqa: N818 - what is needed, not what went wrong
    """A guarded run must be started again with a plan that needs less memory.

    >>> str(RestartNeeded("memory is short at step 20", "bash run.sh", 1))
    'memory is short at step 20. Restart with: bash run.sh'
    """

    def __init__(self, reason: str, command: str, fallback: int) -> None:
        self.reason = reason
        self.command = command
        """The one line that goes on."""
        self.fallback = fallback
        """Which of the saved plan's fallbacks it is."""
        super().__init__(f"{reason}. Restart with: {command}")
