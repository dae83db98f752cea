"""GBNF: llama.cpp's grammar files, compared with a recognizer that tries every derivation."""

import itertools
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance.gbnf_to_lark import AlternativeNode, ASTNode, RepetitionNode, RuleRefNode

from examples import examples
from grammars import COMPILER, start, takes
from outrider.backends.fake import FakeVocabulary
from outrider.constraints.compiler import Compiler
from outrider.constraints.gbnf import Chars, Rules, gbnf_to_lark, parse
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# white space
ws ::= | " " | "\n" [ \t]{0,20}
"""
PROGRAM = r"""
root ::= (declaration)*
declaration ::= dataType identifier "(" parameter? ")" "{" statement* "}"
dataType  ::= "int" ws | "float" ws | "char" ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= dataType identifier
statement ::=
    ( dataType identifier ws "=" ws expression ";" ) |
    ( identifier ws "=" ws expression ";" ) |
    ( identifier ws "(" argList? ")" ";" ) |
    ( "return" ws expression ";" ) |
    ( "while" "(" condition ")" "{" statement* "}" ) |
    ( "if" "(" condition ")" "{" statement* "}" ("else" "{" statement* "}")? ) |
    ( "//" [^\n]* "\n" ) |
    ( "/*" ( [^*] | ("*" [^/]) )* "*/" )
condition ::= expression ("<=" | "<" | "==" | "!=" | ">=" | ">") expression
expression ::= term (("+" | "-") term)*
term ::= factor(("*" | "/") factor)*
factor ::= identifier | [0-9]+ | "-" factor | identifier "(" argList? ")" | "(" ws expression ws ")"
argList ::= expression ("," ws expression)*
ws ::= ([ \t\n]+)
"""

EXAMPLES = [
    (
        JSON,
        ['{"a": [1, -2.5e3, "x\\n", true]}\n  ', "{}", '{"a":{"b":[]}}'],
        ["[1]", '{ "a": 1}x', '{"a": 01}'],
    ),
    (
        PROGRAM,
        [
            "int f(int x){return x+(  1 );}",
            "",
            "char g(){x = f(1)*-y;/* a*b *///c\n}float h(){if(a<=1){}else{}}",
            "int f(){int = 5;}",
        ],
        ["int f(){", "int f(){return;}", "long f(){}"],
    ),
]


def matches(rules: Rules, text: str) -> bool:  # noqa: C901
    """Whether some derivation of `root` is the text. For grammars without left recursion."""
    known: dict[tuple[int, int], set[int]] = {}

    def ends(node: ASTNode, i: int) -> set[int]:
        if (id(node), i) not in known:
            known[id(node), i] = set(found(node, i))
        return known[id(node), i]

    def found(node: ASTNode, i: int) -> Iterable[int]:
        match node:
            case Chars(ranges, negated):
                inside = i < len(text) and any(a <= ord(text[i]) <= b for a, b in ranges)
                return {i + 1} if i < len(text) and inside != negated else ()
            case RuleRefNode(name):
                return ends(rules[name].alternatives, i)
            case AlternativeNode(options):
                return (j for option in options for j in ends(option, i))
            case RepetitionNode(item, least, most):
                return repeated(item, least, most, i)
        places = {i}
        for item in node.children():
            places = {k for j in places for k in ends(item, j)}
        return places

    def repeated(item: ASTNode, least: int, most: int | None, i: int) -> Iterator[int]:
        places = {i}
        for times in itertools.count() if most is None else range(most + 1):
            yield from places if times >= least else ()
            places = {k for j in places for k in ends(item, j)}
            if not places or times > least + len(text):
                return

    return len(text) in ends(rules["root"].alternatives, 0)


@pytest.mark.parametrize(("grammar", "texts", "others"), EXAMPLES)
def test_well_known_grammars_match_what_they_should(
    grammar: str, texts: list[str], others: list[str]
) -> None:
    constraint, rules = start(Grammar("gbnf", grammar)), parse(grammar)
    for text in texts:
        assert matches(rules, text) and takes(constraint, text), text
    for text in others:
        assert not matches(rules, text) and not takes(constraint, text), text


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= a "a" r?\na ::= "a"+\nr ::= "b" r? "b"',  # what "a" takes could be what follows it
        'root ::= a* "b" root | "a"\na ::= "a" "b"?',
        'root ::= ("a" | "ab") ("ba" | "b" root)?',
        'root ::= "a"{2,3} root "b"{0,2} | [ab]',
        'root ::= ("a"+ r?){2}\nr ::= "b" r? "b"',
        'root ::= w "ab" (root | "")\nw ::= [ab]*',
        'root ::= (("a" | "")  "b"*){2} ("a" root)?',
    ],
)
def test_whatever_can_be_derived_can_be_written(grammar: str) -> None:
    assert_writes_what_is_derived(grammar, 6)


def assert_writes_what_is_derived(grammar: str, longest: int) -> None:
    constraint, rules = start(Grammar("gbnf", grammar), Compiler(AB)), parse(grammar)
    end = AB.size - 1
    for length in range(longest + 1):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            tokens = [*AB.tokenize(text), end]
            assert (constraint.permits((), tokens) == len(tokens)) == matches(rules, text), (grammar, text)


AB = FakeVocabulary("ab")

literals = st.sampled_from(['"a"', '"b"', '"ab"', '"ba"', "[ab]", '"aab"'])
pieces = st.recursive(
    literals,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])).map(lambda p: f"({p[0]}){p[1]}")
        | st.lists(inner, min_size=2, max_size=3).map(" ".join)
        | st.lists(inner, min_size=2, max_size=2).map(lambda options: f"({' | '.join(options)})")
    ),
    max_leaves=5,
)


@given(pieces, pieces, pieces, pieces)
@settings(max_examples=examples(60))
def test_random_recursive_grammars_match_what_they_should(one: str, two: str, three: str, four: str) -> None:
    assert_writes_what_is_derived(f'root ::= {one} ("a" root {two})? | {three} x\nx ::= {four} ("b" x)?\n', 5)


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= x y\nx ::= "a" "é"?\ny ::= "è" y | "b"', ["ab", "aèb", "aéb", "aéèb"], ["aééb"]),
        ('root ::= end line name\nend ::= "a"\nline ::= "b"\nname ::= "c"', ["abc"], []),
        ('root ::= x\nx ::= "a"\nx ::= "b"', ["b"], ["a"]),
        ('root ::= root "+" n | n\nn ::= [0-9]+', ["1", "12+3+4"], ["+1", "1+"]),
    ],
    ids=["a first byte that is shared", "names of Lark", "of two rules the last", "left recursion"],
)
def test_small_grammars(grammar: str, texts: list[str], others: list[str]) -> None:
    constraint = start(Grammar("gbnf", grammar))
    assert all(takes(constraint, text) for text in texts)
    assert not any(takes(constraint, text) for text in others)


def test_characters_may_be_spelled_in_every_way() -> None:
    grammar = r'root ::= "caf\u00e9\x41\t\"\\\n" [\u4e00-\u9fff/\]\[^-] [^a-y\U0001F600] "\U0001F600/" .'
    constraint = start(Grammar("gbnf", grammar))
    for letter in "一/][^-":
        assert takes(constraint, f'caféA\t"\\\n{letter}z😀/\n')
    for letter in "ab\\é":
        assert not takes(constraint, f'caféA\t"\\\n{letter}z😀/x')
    assert not takes(constraint, 'caféA\t"\\\n/😀😀/x')


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "no rule named root"),
        ("rot ::= root", "no rule named root"),
        ('root ::= "a"\n\nx ::= foo', "there is no rule named foo"),
        ('root = "a"', "line 1: expected ::="),
        ('root ::= "a', "line 1: .*no end"),
        ('root ::= "a\n"', "line 1: .*no end"),
        ("root ::= [a", "no end"),
        ("root ::= [z-a]", "backwards"),
        ("root ::= []", "empty"),
        ('root ::= ("a"', "line 1: expected '\\)'"),
        ('root ::= "a")', "line 1: expected name"),
        ('root ::= "\\q"', "not an escape"),
        ('root ::= "\\x4"', "not an escape"),
        ('root ::= "\\ud800"', "not a character"),
        ('root ::= "a"{3,2}', "at least 3 and at most 2"),
        ('root ::= "a"{1000000}', "repetitions"),
        ('root ::= "a"{x}', "expected integer"),
        ("root ::= <tool>", "line 1: expected name"),
        ("root ::= root", "nothing can match it"),
        ("root ::= " + "(" * 500 + '"a"' + ")" * 500, "levels"),
        ('root ::= "a" | | | "b" %', "expected name"),
        (
            "\n".join(["root ::= r0", *(f'r{i} ::= "a"' for i in range(1000))]),
            "1,001 rules, 1,000 are the most",
        ),
    ],
)
def test_broken_grammars_are_refused_with_their_line(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        COMPILER.compile(Grammar("gbnf", grammar))
    assert caught.value.what == "grammar" and caught.value.way_out


def test_rules_that_share_rules_are_not_written_out() -> None:
    rules = [f'r{i} ::= "a" r{i + 1} | r{i + 1} "b"' for i in range(100)]  # 2^100 derivations
    constraint = start(Grammar("gbnf", "\n".join(["root ::= r0", *rules, 'r100 ::= "c"'])))
    assert takes(constraint, "a" * 60 + "c" + "b" * 40)
    assert not takes(constraint, "a" * 60 + "c" + "b" * 41)


@pytest.mark.parametrize(
    "grammar",
    [
        "\n".join(
            ['root ::= r0 "x"', *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(45)), 'r45 ::= "" | "a"']
        ),
        f'root ::= {"(" * 40}""{"){8}" * 40} "x"',
    ],
)
def test_empty_parts_that_repeat_each_other_are_not_counted_out(grammar: str) -> None:
    assert gbnf_to_lark(grammar).startswith("start:")  # 2^45, 8^40 parts
