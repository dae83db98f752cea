"""What a new user types in the session of `new_user`, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A command line as a shell takes it; what its exit status is, and what is said, in any order."""

    typed: str
    status: int | tuple[int, ...] = 0
    says: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    """files that are there afterwards"""
    makes_no: tuple[str, ...] = ()


FILES = {
    "prompt.txt": "The three laws of thermodynamics are\n",
    "notes.txt": "The ferry leaves at 7:40 from pier 3.\n",
    "grammar.gbnf": 'root ::= "yes" | "no"\n',
    "text.gguf": "This is a text, whatever its name says.\n",
    "settings.toml": 'model = "model.gguf\nport = eighty\n',
    "keys.toml": "[[key]\n",
}
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}'
)

GUIDES = (
    Line('outrider run -m model.gguf -p "I believe the meaning of life is" -n 24 -no-cnv'),
    Line(
        r'outrider run -m model.gguf -p "Building a website can be done in 10 simple steps:\nStep 1:" '
        "-n 24 -e --temp 0.7 -ngl 99 -c 4096 -t 2",
    ),
    Line('outrider run -m model.gguf -sys "You are brief." -p "What is a tide?" -cnv -st -n 16'),
    Line(
        'outrider run -m model.gguf -p "Once upon a time" -n 24 --top-k 40 --top-p 0.9 --repeat-penalty 1.1 '
        "--repeat-last-n 64 -s 42"
    ),
    Line("outrider run -m model.gguf -f prompt.txt -n 24 --no-display-prompt --log-disable --color"),
    Line(
        "outrider run -m model.gguf -md draft.gguf --draft-max 16 --draft-min 5 --draft-p-min 0.9 -ngld 99 "
        '-fa on -p "Write a poem." -n 24 --temp 0'
    ),
    Line("outrider run -m model.gguf --grammar-file grammar.gbnf -p 'Is water wet?' -n 8"),
    Line(f"outrider run -m model.gguf -j '{SCHEMA}' -p 'Who are you?' -n 40 --temp 0 -q"),
    Line(
        "outrider run -hf ggml-org/gemma-3-1b-it-GGUF --offline -p hi",
        2,
        ("ggml-org/gemma-3-1b-it-GGUF",),
    ),
    Line("echo 'What is a tide?' | outrider run -m model.gguf -i -n 12 --simple-io --mlock --no-mmap"),
    Line("outrider run -m model.gguf -p hi -n 8 --mirostat 2 --mirostat-ent 5", (0, 2)),
    Line("outrider run -m model.gguf -p hi --lora lora.gguf", 2, ("lora.gguf", "no such file")),
    Line("outrider run -m model.gguf -p hi --no-such-option 3", 2, ("--no-such-option",)),
    Line("outrider run -m model.gguf -p hi -n many", 2, ("--predict", "many")),
    Line("outrider run -m model.gguf -p hi -n 9999999999", (0, 2)),
    Line("outrider run -m model.gguf -f no_such_file.txt", 2, ("no_such_file.txt",)),
)
PIPES = (
    Line("outrider run -m model.gguf -q -n 200 --ignore-eos 'Tell me a story' | head -c 10", 141),
    Line("outrider run -m model.gguf --json -n 20 'Tell me a story' | head -c 10", (0, 141)),
    Line("outrider run --help | head -c 10", 141),
    Line("echo hello | outrider chat -m model.gguf -n 40 | head -c 3", 141),
    Line("outrider costs --help | head -n 1", 141),
    Line("outrider run -m model.gguf -n 4 hi < /dev/null > /dev/full", 2, ("no space left",)),
)
BROKEN_FILES = (
    Line("outrider run -m cut.gguf -p hi -n 4", 2, ("cut.gguf",)),
    Line("outrider run -m half.gguf -p hi -n 4", 2, ("half.gguf",)),
    Line("outrider run -m text.gguf -p hi -n 4", 2, ("text.gguf",)),
    Line("outrider run -m . -p hi -n 4", 2),
    Line("outrider run -m /dev/null -p hi -n 4", 2, ("/dev/null",)),
    Line("outrider run -m model.gguf -md text.gguf -p hi -n 4", 2, ("text.gguf",)),
    Line("outrider chat -m cut.gguf", 2, ("cut.gguf",)),
    Line("outrider serve -m cut.gguf --port 0", 2, ("cut.gguf",)),
    Line("outrider serve --config settings.toml", 2, ("settings.toml",)),
    Line("outrider serve -m model.gguf --port 0 --api-keys keys.toml", 2, ("keys.toml",)),
    Line("outrider quantize cut.gguf --to q4_0", 2, ("cut.gguf",)),
    Line("outrider run -m model.gguf --costs text.gguf -p hi -n 4", (0, 2), ("text.gguf",)),
    Line("outrider run -m model.gguf --grammar-file text.gguf -p hi -n 4", 2, ("text.gguf",)),
    Line("outrider run -m model.gguf -p hi -j '{\"type\": 3'", 2, ("schema: it is not JSON",)),
)
FULL_DISK = (
    Line("outrider run -m model.gguf -n 8 --trace full/trace.jsonl hi", 2, ("full/trace.jsonl",)),
    Line("outrider run -m model.gguf -n 200 --ignore-eos hi > full/answer.txt", 2, ("no space left",)),
    Line(
        "outrider verify -m model.gguf --quick -n 4 -p hi -o full/certificate.json",
        2,
        ("full/certificate.json",),
    ),
    Line("outrider quantize model.gguf --to q8_0 --out full", 2, ("full",)),
    Line(
        "printf 'hello\\nagain\\n' | outrider chat -m model.gguf -n 8 --trace full/trace.jsonl", 0, ("trace",)
    ),
    Line(
        "printf 'hello\\n/save full/talk.json\\n' | outrider chat -m model.gguf -n 8", 0, ("full/talk.json",)
    ),
    Line("OUTRIDER_CACHE=full/cache outrider run -m model.gguf -n 8 hi", 0, ("full/cache",)),
)

PASTED = "Line %d of what somebody pasted: words, words, words and 🧀.\n"
PASTE = "".join(PASTED % n for n in range(130))[:7_500]
ASKS = "\x1b[0m>"
CHAT = (
    ("hello\r", "prompt tokens kept"),
    (f"\x1b[200~{PASTE}\x1b[201~\r", "prompt tokens kept"),
    ("/save paste.json\r", "4 messages written"),
    ("/undo\r", ">"),
    ("/again\r", "prompt tokens kept"),
    ("/system Answer in one word.\r", ">"),
    ("/system\r", "Answer in one word."),
    ("/read notes.txt\r", "characters go before"),
    ("When does the ferry leave?\r", "prompt tokens kept"),
    ("/save talk.json\r", "messages written"),
    ("/reset\r", "new conversation"),
    ("/load talk.json\r", "the conversation goes on"),
    ("/load nowhere.json\r", "no such file"),
    ("/read nowhere.txt\r", "no such file"),
    ("/sav\r", "Did you mean /save?"),
    ("/settings\r", "target model"),
    ("/readout\r", "target calls"),
    ("/help\r", "Type a message"),
    ("half a messa\x03", ""),
    ("\x03", "Ctrl-C once more"),
    ('"""one\rtwo"""\r', "prompt tokens kept"),
)
