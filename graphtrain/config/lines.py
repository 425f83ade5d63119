"""Line numbers of the settings in a TOML file, for errors: tomllib does not record them."""

import re
import tomllib

KeyPath = tuple[str, ...]

# Longest first. A multi-line string may end with two more quotes, which belong to its text.
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
    """Return the line of every table header and key of a document that tomllib accepts.

    A table without a header of its own has no entry, nor have keys inside arrays: errors name the
    array. A repeated [[header]] has the line of its first occurrence, and each occurrence with its
    keys has an entry of its own, with its number from 0: ("program", "phase", "1", "until").
    """
    return _Scanner(text.replace("\r\n", "\n")).scan()


class _Scanner:
    """Scanner of the tokens of a valid document, in one pass."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str, int]] = []  # kind, token, line
        self.position = 0
        self.found: dict[KeyPath, int] = {}
        self.repeated: dict[KeyPath, int] = {}  # last number of each array of tables
        self.headers: dict[KeyPath, KeyPath] = {}  # of a numbered table, without its number
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
                is_repeated = self.tokens[self.position][1] == "["
                table = self.key()
                self.found.setdefault(table, line)
                if is_repeated:
                    table = self.occurrence(table)
                    self.found[table] = line
                self.skip_to("\n")
            else:
                self.assignment(table)
        return self.found

    def occurrence(self, table: KeyPath) -> KeyPath:
        """Return the path of the next table of an array of tables."""
        number = self.repeated[table] = self.repeated.get(table, -1) + 1
        numbered = (*table, str(number))
        self.headers[numbered] = table
        return numbered

    def key(self) -> KeyPath:
        """Read a dotted key, and skip the equals sign or closing bracket that ends it."""
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
            if (header := self.headers.get(table)) is not None:
                self.found.setdefault(header + key, line)
        self.value(None if table is None else table + key)

    def value(self, path: KeyPath | None) -> None:
        """Skip a value; record the keys of inline tables, except inside arrays."""
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
        """Skip to one of `ends`. A string with the same text is another kind of token."""
        while self.tokens[self.position][1] not in ends:
            self.position += 1
