"""Where each setting of a TOML file stands, for errors: tomllib keeps no line numbers."""

import re
import tomllib

KeyPath = tuple[str, ...]

# Longest first. Closing a multi-line string takes up to two quotes more: they belong to its text.
_TOKEN = re.compile(
    r'''
      (?P<space> [ \t]+ | \#[^\n]* )
    | (?P<text> """ (?: \\. | [^\\] )*? """ "{0,2} | \'\'\' .*? \'\'\' '{0,2} )
    | (?P<quoted> " (?: \\. | [^"\\\n] )* " | '[^'\n]*' )
    | (?P<bare> [A-Za-z0-9_-]+ )
    | (?P<mark> . )
    ''',
    re.VERBOSE | re.DOTALL,
)


def line_numbers(text: str) -> dict[KeyPath, int]:
    """The line of every table header and key of a document that tomllib accepts.

    A table without a header of its own has no entry. Keys inside arrays have none either: errors
    name the array. Of a repeated [[header]] the first line counts.
    """
    return _Scanner(text.replace("\r\n", "\n")).scan()


class _Scanner:
    """One pass over the tokens; a document is valid, so each construct ends where it should."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str, int]] = []  # kind, token, line
        self.position = 0
        self.found: dict[KeyPath, int] = {}
        line = 1
        for match in _TOKEN.finditer(text):
            if match.lastgroup != "space":
                self.tokens.append((match.lastgroup or "", match.group(), line))
            line += match.group().count("\n")
        self.tokens.append(("mark", "\n", line))

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self.position < len(self.tokens):
            _, token, line = self.tokens[self.position]
            if token == "\n":
                self.position += 1
            elif token == "[":
                self.position += 1
                table = self.key()
                self.found.setdefault(table, line)
                self.skip_to("\n")
            else:
                self.assignment(table)
        return self.found

    def key(self) -> KeyPath:
        """A dotted key; also steps over what ends it: an equals sign or a closing bracket."""
        parts: list[str] = []
        while True:
            kind, token, _ = self.tokens[self.position]
            if kind == "bare":
                parts.append(token)
            elif kind == "quoted":
                parts.extend(tomllib.loads(f"{token} = 0"))
            elif token not in ".[":
                break
            self.position += 1
        self.position += 1
        return tuple(parts)

    def assignment(self, table: KeyPath | None) -> None:
        line = self.tokens[self.position][2]
        key = self.key()
        if table is not None:
            self.found.setdefault(table + key, line)
        self.value(None if table is None else table + key)

    def value(self, path: KeyPath | None) -> None:
        """Step over a value; the keys of inline tables count unless an array holds them."""
        token = self.tokens[self.position][1]
        if token not in ("{", "["):
            self.skip_to("\n", ",", "]", "}")
            return
        self.position += 1
        while (inner := self.tokens[self.position][1]) not in ("]", "}"):
            if inner in (",", "\n"):
                self.position += 1
            elif token == "{":
                self.assignment(path)
            else:
                self.value(None)
        self.position += 1

    def skip_to(self, *ends: str) -> None:
        """Stop at one of ends; a string that only looks like one is another kind of token."""
        while self.tokens[self.position][1] not in ends:
            self.position += 1
