"""Scripts are read as bash reads them, and never run: the words are compared with what bash itself makes of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st

from memcalc.convert.shell import read_script
from memcalc.errors import FileError

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="compares with bash")


def words_of(script: str, known: dict[str, str | None] | None = None) -> list[list[str]]:
    """The words of each `show` of a script, as they are read."""
    commands = read_script(script, known).commands
    return [[token.text for token in one.tokens[1:]] for one in commands if one.tokens[0].text == "show"]


def words_of_bash(script: str) -> list[list[str]]:
    """The same from bash, which runs scripts that this file writes and that do nothing but set and show."""
    shown = "show() { printf '%s\\0' \"$@\" $'\\x01'; }\n"
    done = subprocess.run(
        [BASH or "bash", "-c", shown + script, "x"], capture_output=True, timeout=60, env={}, check=False
    )
    lines = done.stdout.decode().split("\x01\0")[:-1]
    return [[] if not line else line.split("\0")[:-1] for line in lines]


CASES = {
    "quotes": """A='a  b'; B="$A c"; show $A "$A" '$A' "\\$A" a\\ b "$B" ''""",
    "continued": "show a \\\n  b \\\n# c\n  d\n",
    "comments": "show a#b # c\n# show d\nshow e;show f # g\n",
    "remarks": "show a `# b` \\\n  c `# d e` $(# f\n) g\n",
    "defaults": 'B=; show ${A:-x} ${B:-"y z"} ${B-q} ${A:-${B:-w}} "${A:=k}" $A ${A:+p} ${B:+r}',
    "arrays": 'A=(a "b c" --d); A+=(e); show ${A[@]}; show "${A[@]}" ${#A[@]} "${A[1]}" ${A[0]}; show "x ${A[*]}"',
    "arithmetic": "N=4; G=8; show $((N*G)) $(( $N * (G + 2) / 3 % 7 )) $((N==4)) $((N>5 || G<9))",
    "sums to variables": "W=$((2 * 3)); W=$((W-1)); show $W; ((W > 4)) && show big",
    "if": "A=2; if [[ $A == 1 ]]; then B=x; elif [ $A -eq 2 ]; then B=y; else B=z; fi; show $B",
    "nested if": 'if true; then if [ -n "" ]; then A=1; else A=2; fi; B=3; else A=4; fi; show $A $B',
    "and or": '[ -z "$Q" ] && A=1 || A=2; [[ -n $Q ]] && A=3; true && false || B=4; show $A $B',
    "or chain": 'T=M; if [[ "$T" == "M" ]] || [[ "$D" == "M" ]] || [[ -z "$T" ]]; then A=1; else A=2; fi; show $A',
    "patterns": "M=llama-3-8b; [[ $M == llama* ]] && A=1; [[ $M != *70b ]] && B=2; show $A $B",
    "case": 'S="8B"\ncase "${S}" in\n "800M") A=1 ;;\n 8B|9B)\n A=2; B=3\n ;;\n *) A=4; exit 1 ;;\nesac\nshow $A $B',
    "loops": 'for x in only; do A="$A$x"; done; while [[ $# -gt 0 ]]; do B=9; shift; done; show "$A" ${B:-0}',
    "functions": 'f() { A=$1; show "$2" $#; }\nfunction g {\n f "$@" z\n}\nf 1 "a b"\ng 7\nshow $A',
    "subshell": "A=1; (A=2; show $A); show $A; { A=3; }; show $A",
    "eval": "C='show a \"b c\" $D'; D=4; eval $C",
    "appended": 'A="--x 1"; A="$A \\\n  --y 2"; A+=" --z"; show $A',
    "heredoc": "cat <<EOF > /dev/null\nshow not\nEOF\nshow yes <<'E2' a\n$X\nE2\nshow b",
    "redirections": "show a > /dev/null 2>&1; show b 2>/dev/null | cat; show c < /dev/null",
    "single braces": "show {a} a{b }c [x] ~x a=b x+=1",
    "windows": "A=1\r\n",
    "negated": 'if ! [ -n "$Q" ]; then A=1; fi; if [ ! -n "$Q" ]; then B=2; fi; show $A $B',
    "unset": "A=1; unset A; show ${A:-gone}",
    "export": "export A=1 B='2 3'; declare -i C=4; readonly D=5; show $A \"$B\" $C $D",
    "prefix": "A=1; A=2 true; show $A",
    "arguments": 'show "$@" x $*; A=${1:-8}; show $A $#; if [ "$1" = "" ]; then show none; fi',
    "names": 'NNODES=2; N=4; show $NNODES ${N}NODES $N-x "$N"y',
    "dollar": 'show $ "$" a$ "a$ b"',
}


@needs_bash
@pytest.mark.parametrize("name", CASES)
def test_words_are_those_of_bash(name: str) -> None:
    script = CASES[name]
    found = words_of(script)
    expected = words_of_bash(script.replace("show a > /dev/null 2>&1; show b 2>/dev/null | cat", "show a; show b"))
    assert found == expected


NAMES = st.sampled_from(["A", "B", "C_1"])
TEXTS = st.text(st.sampled_from("ab1 -=.,/:"), max_size=6)
ATOMS = st.one_of(
    TEXTS.map(lambda text: f"'{text}'"),
    TEXTS.map(lambda text: f'"{text}"'),
    st.from_regex(r"[a-z0-9.,/:-]{1,6}", fullmatch=True),
    NAMES.map(lambda name: f'"${name}"'),
    NAMES.map(lambda name: f"${{{name}}}"),
    st.builds(lambda name, text: f"${{{name}:-{text}}}", NAMES, st.from_regex(r"[a-z]{1,3}", fullmatch=True)),
    st.builds(lambda name, text: f'"${{{name}:-{text}}}"', NAMES, TEXTS),
    st.builds(lambda a, b: f"$(({a} * {b} + 1))", st.integers(0, 99), st.integers(0, 99)),
    st.just("\\\n"),
)
WORDS = st.lists(ATOMS, min_size=1, max_size=3).map("".join)
SETS = st.one_of(
    st.builds(lambda name, token: f"{name}={token}", NAMES, WORDS),
    st.builds(lambda name, token: f"{name}+={token}", NAMES, WORDS),
    st.builds(lambda tokens: f"L=({' '.join(tokens)})", st.lists(WORDS, max_size=3)),
    st.builds(lambda tokens: f"L+=({' '.join(tokens)})", st.lists(WORDS, max_size=3)),
)
SHOWS = st.lists(st.one_of(WORDS, st.just('"${L[@]}"'), st.just("${L[@]}")), max_size=4).map(
    lambda tokens: f"show {' '.join(tokens)}"
)
TESTS = st.one_of(
    st.builds(lambda name, token: f'[[ "${name}" == {token} ]]', NAMES, st.from_regex(r"[a-z]{1,2}", fullmatch=True)),
    st.builds(lambda flag, name: f'[ {flag} "${name}" ]', st.sampled_from(["-z", "-n", "! -z"]), NAMES),
    st.builds("[ {} {} {} ]".format, st.integers(0, 3), st.sampled_from(["-eq", "-lt", "-ge"]), st.integers(0, 3)),
)  # fmt: skip
SIMPLE = st.one_of(SETS, SHOWS)
LINES = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds(lambda test, a, b: f"if {test}; then\n{a}\nelse\n{b}\nfi", TESTS, inner, inner),
        st.builds(lambda test, a: f"{test} && {a}", TESTS, SIMPLE),
        st.builds(lambda test, a: f"{test} || {a}", TESTS, SIMPLE),
        st.builds(lambda a, b: f"case ${{A}} in\n a*|b) {a} ;;\n *)\n{b}\n;;\nesac", inner, inner),
        st.builds(lambda a: f"({a})", SIMPLE),
        st.builds(lambda a: "{ " + a + "; }", SIMPLE),
        st.builds(lambda a: f"for x in one; do\n{a}\nshow $x\ndone", inner),
    ),
    max_leaves=5,
)


@needs_bash
@given(st.lists(LINES, min_size=1, max_size=6))
@drawn(150)
def test_scripts_are_read_as_bash_runs_them(lines: list[str]) -> None:
    script = "A=; B=x; C_1='p q'; L=()\n" + "\n".join(lines) + "\n"
    assert words_of(script) == words_of_bash(script)


# ---------------------------------------------------------------------------------------------- what only a run tells


def unknown(script: str, known: dict[str, str | None] | None = None) -> list[tuple[str, str]]:
    command = read_script(script, known).commands[-1]
    return [(token.text, token.unknown) for token in command.tokens[1:]]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("show $(nproc) a", [("", "$(nproc)"), ("a", "")]),
        ('C="`pwd`/t.py --n 4"; show $C', [("./t.py", ""), ("--n", ""), ("4", "")]),
        ("if [ -f x ]; then A=1; else A=2; fi; show $A", [("", "A")]),
        ("if [ -f x ]; then A=1; else A=1; fi; show $A", [("1", "")]),
        ("A=1; if [ -f x ]; then A=2; fi; show $A", [("", "A")]),
        ("A=1; if [ -f x ]; then exit 1; A=2; fi; show $A", [("1", "")]),
        ("[ -f x ] && A=1; show $A", [("", "A")]),
        ("L=(a); if [ -f x ]; then L+=(--b); fi; show ${L[@]}", [("a", ""), ("--b", "L")]),
        ("for i in 1 2; do A=$i; done; show $A", [("", "i")]),
        ("while read x; do A=1; done < f; show $A", [("", "A")]),
        ("show $N ${N:-2}", [("", "N"), ("2", "")]),
        ("show a $EXTRA_ARGS b", [("a", ""), ("b", "")]),
        ("A=$1; show $A ${A:-3}", [("", "$1"), ("3", "")]),
        ("A=$((N * 2)); show $A", [("", "N * 2")]),
        ("A=$((1/0)); show $A", [("", "1/0")]),
        ("A=$((2**9999999)); show $A", [("", "2**9999999")]),
    ],
)
def test_what_only_a_run_tells_stays_unknown(script: str, expected: list[tuple[str, str]]) -> None:
    assert unknown(script) == expected


def test_variables_of_the_queue_are_known_or_known_to_be_set() -> None:
    script = 'N=${SLURM_NNODES:-1}; J=${SLURM_JOB_ID:-0}; if [ -n "$SLURM_JOB_ID" ]; then Q=1; fi; show $N $J ${Q:-0}'
    known: dict[str, str | None] = {"SLURM_NNODES": "4", "SLURM_JOB_ID": None}
    assert unknown(script, known) == [("4", ""), ("", "SLURM_JOB_ID"), ("", "Q")]
    assert unknown(script) == [("1", ""), ("0", ""), ("0", "")]


def test_a_character_that_marks_what_is_unknown_may_stand_in_what_the_queue_sets() -> None:
    assert words_of("show $SLURM_GPUS_PER_TASK", {"SLURM_GPUS_PER_TASK": "h1\ue00000:8"}) == [["h1?00:8"]]


def test_an_inner_shell_is_read_with_what_starts_it() -> None:
    script = "export A='python t.py --n 4'\nsrun --jobid 1 bash -c \"$A --rank \\$SLURM_PROCID\" 2>&1 | tee log\n"
    found = read_script(script, {"SLURM_PROCID": None}).commands[0]
    assert [token.text for token in found.tokens][:7] == ["srun", "--jobid", "1", "python", "t.py", "--n", "4"]
    assert found.tokens[8].unknown == "SLURM_PROCID"


def test_each_character_knows_where_it_was_written() -> None:
    script = 'MBS=16\nARGS="--mbs $MBS --lr 1e-4"\npython t.py $ARGS --name "a $MBS" \\\n --seq=2048\n'
    tokens = read_script(script).commands[0].tokens
    for token in tokens:
        for letter, place in zip(token.text, token.positions, strict=True):
            assert script[place] == letter
    assert tokens[3].span == (4, 6)
    assert tokens[7].span is None


def test_a_file_that_the_script_writes_is_found() -> None:
    script = 'S=3\ncat <<EOT > ds.json\n{"stage": $S}\nEOT\n'
    script += """echo '{"a": 1}' > b.json\ncat > c.json <<'E'\n{"x": "$S"}\nE\n"""
    files = read_script(script).files
    assert [(one.name, one.text.text) for one in files] == [
        ("ds.json", '{"stage": 3}\n'),
        ("b.json", '{"a": 1}'),
        ("c.json", '{"x": "$S"}\n'),
    ]
    assert files[0].text.positions[files[0].text.text.index("3")] == script.index("3")


def test_a_value_that_doubles_itself_is_unknown() -> None:
    found = unknown("X=aaaaaaaaaaaaaaaa\n" + "X=$X$X\n" * 13 + "show $X\n")
    assert found == [("", "a value of extraordinary length")]


@pytest.mark.parametrize(
    "script",
    [
        "X='" + "a " * 9000 + "'\n" + "show $X\n" * 60,
        "X=aaaaaaaaaaaaaaaa\n" + "X=$X$X\n" * 400,
        "f() { f; f; }\nf\n",
        "f() { g a; g b; }\ng() { f b; f c; }\nf\n",
        "( " * 80 + "\n",
        "if true; then\n" * 80,
    ],
    ids=["words", "characters", "recursion", "two functions", "brackets", "conditions"],
)
def test_what_is_too_much_is_refused(script: str) -> None:
    with pytest.raises(FileError, match=r"must be a script of at most|must nest at most"):
        read_script(script)


def test_a_case_that_is_cut_short_ends() -> None:
    found = read_script('case while [[ $# -gt 0 ]]\ndo\nkey="$1"\ncase $key in\n').commands
    assert len(found) < 9


def test_nothing_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    touch = f"touch {canary}"
    script = f"""A=$({touch}); B=`{touch}`; C=${{D:-$({touch})}}; eval "{touch}"; bash -c '{touch}'; {touch}
cat <<EOF > {canary}
$({touch})
EOF
f() {{ {touch}; }}; f; (( $({touch}) )); [[ -n $({touch}) ]]; trap '{touch}' EXIT; . <({touch})
"""
    read_script(script)
    assert not canary.exists()
