"""Scripts of a shell, as the words that they hand to what trains: read, never executed.

Variables, arrays, defaults, sums, tests of texts, and documents within are followed; what only a
run knows, such as $1 or $(hostname), stays as it is written.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

MOST_CHARACTERS = 2**20
"""Of a text with variables in their places: those of others grow without end."""
_MOST_IN_ALL = 2**26
"""Of all such texts of a script."""
_MOST_TAKEN = 16
"""Of scripts that another one takes for its own."""
_MOST_ROUNDS = 8
"""Of variables that stand for others."""

_DOCUMENT = re.compile(
    r"^(?P<head>[^\n#]*<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[^\n]*)\n"
    r"(?P<body>(?:(?![ \t]*(?P=end)[ \t]*$)[^\n]*\n)*)[ \t]*(?P=end)[ \t]*$",
    re.MULTILINE,
)
_CONFIGS = (".json", ".yaml", ".yml", ".toml")
_BATCH = re.compile(r"^#SBATCH[ \t]+([^#\n]*)", re.MULTILINE)
_COMMENT = re.compile(r"(^|[ \t(;])#[^\n]*", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<blank>(?:[ \t]|\\\n)++)
    | (?P<word>(?>\w+\+?=\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)
      | '[^']*+' | "(?:[^"\\]|\\.)*+" | \\. | \$\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)
      | \$\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\} | `[^`]*+` | [^\s;&|()])++)
    | (?P<end>.)""",
    re.DOTALL | re.VERBOSE,
)
_BLANK = "\\ \t\n"
"""At the end of a script, also a mark that a line continues."""
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_USED = re.compile(
    r"\$\{(\w+|@|\*)(?:\[[@*\d]+\])?(?:(:?[-=?+])([^{}]*))?\}|\$([A-Za-z_]\w*|\d|[@*])"
)
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)|\$\[([^\[\]]*)\]")
_QUOTED = re.compile(r"\\(.)|'([^']*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_SUMS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED = {
    **dict.fromkeys(("=", "==", "-eq"), operator.eq),
    **dict.fromkeys(("!=", "-ne"), operator.ne),
    **dict.fromkeys((">", "-gt"), operator.gt),
    **dict.fromkeys(("<", "-lt"), operator.lt),
    "-ge": operator.ge,
    "-le": operator.le,
}
_WITHOUT_TRAINING = {
    *("echo", "printf", "cat", "exit", "return", "cd", "mkdir", "rm", "cp", "mv", "ls", "ln"),
    *("source", ".", "pip", "pip3", "git", "wget", "curl", "tar", "find", "grep", "sed", "awk"),
    *("set", "unset", "ulimit", "module", "ml", "conda", "mamba", "spack", "apt", "apt-get"),
    *("shift", "trap", "sleep", "chmod", "kill", "pkill", "ps", "nvidia-smi", "date", "tail"),
    *("head", "tee", "touch", "getopts", "hostname", "scontrol", "aws", "gsutil", "which"),
}
"""Commands whose flags are of no trainer."""
_BEFORE = {"then", "do", "{", "time", "exec", "eval", "export", "local", "readonly", "declare"}


@dataclass(slots=True)
class Script:
    """What a script says: words of what it starts, its variables, and files that it writes.

    `batch` are the words of #SBATCH, `commands` those of each, and `aside` those that variables
    hold, used or not.
    """

    batch: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    aside: list[list[str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)


def read(
    text: str, environment: Mapping[str, str], beside: Callable[[str], str | None] = lambda _: None
) -> Script:
    """The script; variables that it does not set are those of `environment`.

    `beside` gives the text of a script by its name, which this one takes for its own (`source`).

    Raises ValueError where its words grow without end.
    """
    script = Script()
    run = _Run(script, environment, beside)
    run.all(text)
    script.aside = [value.split() for value in script.variables.values() if "--" in value]
    return script


_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
}
"""Variables of a job by its options (`man sbatch`, output environment variables)."""


def _of_batch(words: Sequence[str]) -> dict[str, str]:
    """Variables that Slurm sets; a number of GPUs is behind their kind."""
    text = " ".join(words)
    options = re.findall(r"(?:^|\s)--?([A-Za-z-]+)[= ]*(?:[\w.-]+:)*(\d+)(?=\s|$)", text)
    variables = {name: count for key, count in options for name in _SLURM.get(key, ())}
    tasks, nodes = variables.get("SLURM_NTASKS_PER_NODE"), variables.get("SLURM_NNODES")
    if tasks and nodes:
        variables.setdefault("SLURM_NTASKS", str(int(tasks) * int(nodes)))
    return variables


def _statements(text: str) -> Iterator[tuple[str, list[str], str]]:
    """Separators before, words as they are written, and the separator behind them."""
    words: list[str] = []
    separators = ""
    for match in _TOKEN.finditer(f"{text.rstrip(_BLANK)}\n"):
        if word := match["word"]:
            words.append(word)
        elif end := match["end"]:
            if words:
                yield separators, words, end
                separators, words = "", []
            separators += end


@dataclass(slots=True)
class _Branch:
    """Of `if`, `case` or a loop: whether what follows runs, and whether a branch before it did."""

    active: bool | None
    done: bool | None
    subject: str | None = None
    waiting: bool = False

    def next(self, *, holds: bool | None) -> None:
        """Another branch, with this condition."""
        if self.done is not False and holds is not False:
            holds = None if self.done is None else False
        self.active = holds
        self.done = self.done if holds is False else holds


@dataclass(slots=True)
class _Run:
    """What is known as one statement follows another."""

    script: Script
    environment: Mapping[str, str]
    beside: Callable[[str], str | None]
    branches: list[_Branch] = field(default_factory=list)
    last: bool | None = None
    length: int = 0
    taken: int = 0

    def all(self, text: str) -> None:
        """Follow a script, and what it writes to files of configuration."""
        documents: dict[str, str] = {}

        def body(match: re.Match[str]) -> str:
            target = re.search(r">\s*([^\s<>]+)", match["head"])
            name = target[1] if target else ""
            if match["body"].lstrip().startswith("{") or name.strip("'\"").endswith(_CONFIGS):
                documents[name] = match["body"]
                return ""
            return match["body"]

        text = _DOCUMENT.sub(body, text.replace("\r", ""))
        words = [word for line in _BATCH.findall(text) for word in line.split()]
        self.script.batch += words
        self.script.variables |= _of_batch(words)
        text = re.sub(r"\\[ \t]*\n", " ", _COMMENT.sub(r"\1", text))
        for separators, statement, after in _statements(text):
            self.statement(separators, statement, after)
        for name, document in documents.items():
            self.script.documents[_bare(self.filled(name))] = self.filled(document)

    def statement(self, before: str, words: list[str], after: str) -> None:
        """Take one."""
        if self.branches and self._is_pattern(before, words, after):
            return
        while words and words[0] in _BEFORE | {"else"}:
            if words[0] == "else" and self.branches:
                self.branches[-1].next(holds=True)
            words = words[1:]
        if words and not self._controls(words):
            states = {branch.active for branch in self.branches}
            joined = {"&&": self.last, "||": None if self.last is None else not self.last}
            states.add(joined.get(before.strip()[-2:], True) if self.last is not None else True)
            self.last = None
            if False not in states:
                self._execute(words, certain=None not in states)

    def _is_pattern(self, before: str, words: list[str], after: str) -> bool:
        """Whether these are a pattern of `case`."""
        branch = self.branches[-1]
        if branch.subject is None or words[0] == "esac":
            return False
        if ";;" in before:
            branch.waiting = True
        if not branch.waiting:
            return False
        pattern = _bare(self.filled(words[-1]))
        unknown = "$" in branch.subject + pattern
        holds = None if unknown else fnmatchcase(branch.subject, pattern)
        if "|" not in before or branch.active is False:
            branch.next(holds=holds)
        branch.waiting = after != ")"
        return True

    def _controls(self, words: list[str]) -> bool:
        """Follow a word that opens, changes or ends a branch; whether it was one."""
        head, rest = words[0], words[1:]
        if head == "if":
            holds = self._holds(rest)
            self.branches.append(_Branch(active=holds, done=holds))
        elif head == "elif" and self.branches:
            self.branches[-1].next(holds=self._holds(rest))
        elif head == "case" and rest:
            subject = re.sub(r"\$\{?[A-Za-z_]\w*\}?", "", _bare(self.filled(rest[0])))
            self.branches.append(_Branch(active=False, done=False, subject=subject, waiting=True))
            if len(rest) > 2:  # noqa: PLR2004 - a pattern behind `case $A in`
                self._is_pattern("", rest[2:], ")")
        elif head in {"for", "while", "until", "select"}:
            self.branches.append(_Branch(active=True, done=True))
            if head == "for" and rest:
                each = self._words(rest[2:])
                value = each[0] if len(each) == 1 and "$" not in each[0] else f"${{{rest[0]}}}"
                self.script.variables[rest[0]] = value
        elif head in {"fi", "esac", "done"}:
            del self.branches[-1:]
        elif head in {"[", "[[", "test"}:
            self.last = self._holds(words)
        else:
            return False
        return True

    def _holds(self, words: Sequence[str]) -> bool | None:
        """Whether a test does; None where only a run can tell."""
        words = [_bare(self.filled(word)) for word in words if word not in {"[", "]", "[[", "]]"}]
        words = words[words[:1] == ["test"] :]
        negated = words[:1] == ["!"]
        words = words[negated:]
        if any(re.search(r"\$[\d({#]|`", word) and "$" in word for word in words):
            words = [re.sub(r"\$\{[A-Za-z_]\w*\}", "", word) for word in words]
            if any("$" in word or "`" in word for word in words):
                return None
        words = [re.sub(r"\$[A-Za-z_]\w*", "", word) for word in words]  # not set: empty
        holds: bool | None = None
        match words:
            case ["-z", text]:
                holds = not text
            case ["-n", text] | [text]:
                holds = bool(text) if text not in {"true", "false"} else text == "true"
            case [left, sign, right] if sign in _COMPARED:
                try:
                    a, b = (int(left or 0), int(right or 0)) if sign[0] == "-" else (left, right)
                    holds = bool(_COMPARED[sign](a, b))
                except ValueError:
                    holds = None
        return holds if holds is None else holds != negated

    def _execute(self, words: list[str], *, certain: bool) -> None:
        while words and (match := _ASSIGNED.fullmatch(words[0])):
            self._assign(match[1], match[3], more=bool(match[2]), certain=certain)
            words = words[1:]
        if words[:1] in (["source"], ["."]) and words[1:] and self.taken < _MOST_TAKEN:
            self.taken += 1
            name = _bare(self.filled(words[1]))
            self.all(self.beside(re.sub(r".*[$`)}][^/]*/", "", name)) or "")
        elif words and words[0] not in _WITHOUT_TRAINING:
            self.script.commands.append(self._words(words))

    def _assign(self, name: str, value: str, *, more: bool, certain: bool) -> None:
        """Set a variable; to itself, which nothing knows, where it may have another value."""
        variables = self.script.variables
        is_array = value.startswith("(") and value.endswith(")")
        text = self.filled(value[1:-1] if is_array else value)
        text = " ".join(text.split()) if is_array else _bare(text)
        if more:
            text = f"{variables.get(name, '')}{' ' * is_array}{text}"
        if not certain and variables.get(name, text) != text and not more:
            text = f"${{{name}}}"
        variables[name] = text
        self._count(text)

    def _words(self, words: Sequence[str]) -> list[str]:
        """With variables in their places; what is flags in quotes is several."""
        made = []
        for word in words:
            text = _bare(self.filled(word))
            is_one = word[:1] in {"'", '"'} or "$(" in text
            is_one = is_one and "-" not in text[:1] and " --" not in text
            made += [text] if is_one else _bare(text).split()
        return made

    def _count(self, text: str) -> None:
        self.length += len(text)
        if len(text) > MOST_CHARACTERS or self.length > _MOST_IN_ALL:
            raise ValueError(f"its variables grow beyond {MOST_CHARACTERS:,} characters")

    def filled(self, text: str) -> str:
        """With the values of variables and of sums in their places, as far as they are known."""
        for _ in range(_MOST_ROUNDS):
            more = _SUM.sub(self._sum, _USED.sub(self._value, text))
            if more == text:
                break
            text = more
            self._count(text)
        return text

    def _value(self, match: re.Match[str]) -> str:
        name, how, other = match[1] or match[4], match[2] or "", match[3]
        if name in "@*":
            return ""
        value = self._known(name)
        if how.endswith("+"):
            return other if value else ""
        if value is None or (not value and how.startswith(":")):
            if how.endswith("="):
                self.script.variables[name] = self.filled(other)
            return other if how.endswith(("-", "=")) else match[0]
        return value

    def _known(self, name: str) -> str | None:
        """The value of a variable; that of the environment where the script has none."""
        value = self.script.variables.get(name)
        return self.environment.get(name, value) if value is None or "$" in value else value

    def _sum(self, match: re.Match[str]) -> str:
        """Of whole numbers; as it is written where there are others."""
        text = (match[1] or match[2] or "").strip()
        text = re.sub(r"(?<![\w$])[A-Za-z_]\w*", lambda n: self._known(n[0]) or n[0], text)
        try:
            return str(_number(ast.parse(text, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return match[0]


def _bare(text: str) -> str:
    """Without quotes."""
    return _QUOTED.sub(lambda match: match[1] or match[2] or match[3] or "", text)


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(result)):
            pass
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUMS:
            result = _SUMS[type(op)](_number(left), _number(right))
        case _:
            raise ValueError
    if abs(result) > 2**63:
        raise ValueError
    return int(result)
