"""The words that synthetic text is made of: plain English adjectives, nouns and verbs, and made-up names."""

import numpy as np

ADJECTIVES = (
    "abrupt amber ancient ashen bitter blunt brave brisk calm careful cheap clever cloudy coarse cold cosmic crisp "
    "curious damp dapper dark deep distant dusty eager early earnest elegant empty faint familiar feeble fierce fluffy "
    "foolish fragile fresh frosty gentle giant glossy golden graceful grand grateful gritty grumpy hasty heavy hollow "
    "honest humble icy idle jolly keen kind large lazy light lively lonely loud lucky marble mellow merry mighty misty "
    "modern muddy narrow nimble noble noisy odd old open pale patient plain polite proud purple quick quiet rapid rare "
    "rough rural rusty sandy scarlet secret shallow sharp shiny silent silver simple sleepy slow small smooth solemn "
    "sour spare stark steep stormy strange sturdy subtle sudden sunny sweet swift tall tame tender thick thin tidy "
    "tiny tough urban vague vast velvet vivid warm weary wild wise wooden young zesty"
).split()
NOUNS = (
    "acorn anchor apple arrow attic badge bakery barrel basket beacon bell bench bicycle blanket boat bottle branch "
    "bread bridge broom bucket butter button cabin cable camera candle canvas carpet castle cellar chain chair cheese "
    "chimney circle clock cloud coast collar comet copper corner cotton cradle crown curtain desk diamond dinner door "
    "drawer drum eagle engine envelope fabric falcon farm feather fence ferry field finger flag flame flour flute fog "
    "forest fork fountain garden gate glacier glove grain guitar hammer harbour harvest helmet hill honey hotel house "
    "island jacket jewel jungle kettle kitchen kite ladder lake lantern leaf lemon letter library lighthouse lion lock "
    "magnet maple market meadow mirror mountain museum needle nest notebook oak ocean orchard oven paddle palace "
    "paper pebble pencil pepper pillow planet plough pocket pond puzzle queen quilt rabbit radio raft railway ribbon "
    "river road robot roof rope saddle salad sail scarf school shell ship shovel signal sleeve spoon spring stable "
    "statue stone storm street sugar table tablecloth teapot temple thread thunder ticket tiger timber tower train "
    "tunnel turtle umbrella valley vase village violin wagon wallet walnut water wheel whistle window winter wolf yard"
).split()
VERBS = (
    "asks brings builds carries catches changes claims counts crosses draws drops enters feels finds follows forgets "
    "gathers gives guards hears helps hides holds joins keeps knows leads leaves likes lifts makes marks meets moves "
    "needs offers opens paints passes picks plants pulls pushes reaches reads remembers repairs saves sees sells sends "
    "shows sings takes teaches tells throws touches turns uses visits walks wants watches wears writes"
).split()
_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sl sp st t th tr v w wh y z".split()
_VOWELS = "a e i o u ai ea ee oa oo ou y".split()
_CODAS = ["", "", "", *"b ck ct d ft g k l ld ll m mp n nd ng nk nt p r rd rk rm rn rt s sh sk ss st t th x".split()]


def made_up_word(random: np.random.Generator) -> str:
    """A pronounceable word of one to three syllables: keys of text that the training never saw look like this."""
    syllables = random.integers(1, 4)
    return "".join(
        _ONSETS[random.integers(len(_ONSETS))]
        + _VOWELS[random.integers(len(_VOWELS))]
        + _CODAS[random.integers(len(_CODAS))]
        for _ in range(syllables)
    )


def key(random: np.random.Generator) -> str:
    """What a number is kept under: adjective and noun with a hyphen, known words or made-up ones."""
    known = random.random() < 0.6
    first = ADJECTIVES[random.integers(len(ADJECTIVES))] if known else made_up_word(random)
    second = NOUNS[random.integers(len(NOUNS))] if known else made_up_word(random)
    return f"{first}-{second}"


def sentence(random: np.random.Generator) -> str:
    """A plain sentence about nothing that is asked for."""

    def thing() -> str:
        noun = NOUNS[random.integers(len(NOUNS))] if random.random() < 0.8 else made_up_word(random)
        return f"{ADJECTIVES[random.integers(len(ADJECTIVES))]} {noun}"

    verb = VERBS[random.integers(len(VERBS))]
    subject = ("The", "A", "Every", "This", "No", "My", "Their")[random.integers(7)]
    ends = (".", f" in the {thing()}.", f", but the {thing()} {VERBS[random.integers(len(VERBS))]} it.", " again.")
    return f"{subject} {thing()} {verb} the {thing()}{ends[random.integers(len(ends))]}"


def unique_identifier(random: np.random.Generator) -> str:
    """A random identifier in the form of a version-4 UUID."""
    digits = "".join("0123456789abcdef"[value] for value in random.integers(16, size=32))
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def variable_name(random: np.random.Generator) -> str:
    """Five capital letters."""
    return "".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[value] for value in random.integers(26, size=5))
