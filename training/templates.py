"""The wording of facts and questions: RULER's (Hsieh et al., arXiv 2404.06654) and shorter ones of the same kind.

`{key}`, `{value}` and `{name}` begin with the space that separates them from the word before.
"""

NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INTRODUCTIONS = {
    "number": "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n",
    "numbers": "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n",
    "uuid": "A special magic uuid is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the uuid afterwards.\n",
    "variables": "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
}
FACTS = (
    " One of the special magic {things} for{key} is:{value}.",
    " The special magic {thing} for{key} is:{value}.",
    "{key} is{value}.",
)
QUESTIONS = {
    "single": (
        "\nWhat is the special magic {thing} for{key} mentioned in the provided text?"
        " The special magic {thing} for{key} mentioned in the provided text is",
        "\nWhat is the special magic {thing} for{key} mentioned in the text above?"
        " The special magic {thing} for{key} mentioned in the text above is:",
        "\n{key} is",
    ),
    "multivalue": (
        "\nWhat are all the special magic {things} for{key} mentioned in the provided text?"
        " The special magic {things} for{key} mentioned in the provided text are",
    ),
    "ordinal": (
        "\nWhat is the{ordinal} special magic {thing} for{key} mentioned in the provided text?"
        " The{ordinal} special magic {thing} for{key} mentioned in the provided text is",
        "\n{key} is{ordinal}:",
    ),
}
ORDINALS = (" first", " second", " third", " last")
ASSIGNMENT = "\nVAR{name} ={value}."
LISTING = (
    "\nQuestion: Find all variables that are assigned the value{value} in the text above."
    " Answer: According to the chain(s) of variable assignment in the text above,{count} variables are assgined the"
    " value{value}, they are:"
)
HOPS = (
    "\nQuestion: What is the value of VAR{name} in the text above? Answer: The value of VAR{name} is",
    "\nVAR{name} is",
)
ALL_TEXT = (
    NOISE,
    *INTRODUCTIONS.values(),
    *FACTS,
    *(text for texts in QUESTIONS.values() for text in texts),
    ASSIGNMENT,
    LISTING,
    *HOPS,
    *ORDINALS,
    " VAR",
    " numbers number uuids uuid are, and",
)
