"""Word lists for the synthetic tasks and the English-like filler grammar."""

NOUNS = """amber anchor apple arrow atlas autumn badge badger bamboo banjo barrel basil basket beacon beaver bell berry birch
bishop blanket blossom boat bonfire bottle boulder branch brass breeze brick bridge bronze brook bucket butter button cabin cactus camel
canal candle canoe canvas canyon carbon carpet castle cedar cellar chalk charm cherry chimney cinder circus citrus clay cliff
clock cloud clover cobalt coffee comet compass copper coral cotton cradle crane crater cricket crown crystal curtain cypress dagger
dahlia daisy desert diamond dolphin dragon drum dune eagle ember emerald engine falcon feather fern ferry fiddle flame flint
flute forest fossil fountain fox galaxy garden garnet gate geyser ginger glacier glove goblet granite grape gravel guitar hammer
harbor harp harvest hawk hazel helmet heron hill honey horizon hornet iceberg igloo indigo iris iron island ivory ivy jacket jade
jaguar jasmine jasper jungle juniper kayak kernel kettle kitten lagoon ladder lantern lapis laurel lava lemon leopard lily linen lion
lizard lobster lotus lynx magnet magnolia mango mantle maple marble market meadow melon mercury meteor mirror monsoon moon moss
mountain mustard nectar needle nickel nutmeg oak oasis ocean olive onyx opal orange orbit orchard orchid otter owl oyster
paddle palace panther paper parrot peach pearl pebble pelican penguin pepper piano pigeon pillow pine pirate planet plaza plum pocket
pollen pond poppy prairie prism pumpkin quartz quill rabbit raven reef ribbon river robin rocket rose ruby saddle saffron sail salmon
sandal sapphire satin scarlet shadow shell shield shovel signal silver sparrow spider spiral spring spruce squid stone storm
summit sunset swan tango teapot temple thistle thunder tiger timber topaz torch tower tulip tundra tunnel turtle valley vanilla
velvet violet violin volcano walnut walrus water whale wheat willow window winter wolf wren yarrow yellow zebra zenith zephyr zinc""".split()

ADJ = """old new small large quiet bright dark heavy gentle clever simple strange warm cold distant empty hollow ancient modern
narrow wide soft sharp slow quick patient careful honest famous common rare humble proud lonely friendly wooden golden silent
broken hidden open steady early late plain clean dusty green blue red white black pale shiny rough smooth curious lucky""".split()

VERBS = """watched found carried followed visited repaired painted described opened closed crossed noticed remembered
forgot built sold bought moved cleaned counted measured lifted studied admired collected borrowed returned guarded
planted photographed discovered ignored wrapped polished searched reached""".split()

PEOPLE = """farmer teacher doctor sailor painter baker student engineer captain writer merchant gardener singer neighbor
traveler child hunter miller pilot scientist librarian carpenter nurse judge soldier tailor""".split()

PLACES = """village city market harbor station library school museum kitchen office park field bridge square theater
church hotel farm shop beach hall barn yard street corner lake""".split()

TIMES = """in the morning|at noon|after dinner|before sunrise|in the evening|at midnight|on Monday|on Friday|last winter|during the summer|
after the storm|once a week|every day|for a while|at the end of the day|two days later|a long time ago|in early spring""".replace(
    "\n", ""
).split("|")

ADV = """slowly quickly quietly carefully often rarely usually finally suddenly gladly sadly politely calmly""".split()

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"

NOUNS = sorted(set(NOUNS))


def sentence(rng):
    r = rng.random
    c = lambda xs: xs[int(r() * len(xs))]
    np = lambda: "the " + (c(ADJ) + " " if r() < 0.6 else "") + c(PEOPLE if r() < 0.5 else NOUNS)
    k = int(r() * 8)
    t = " " + c(TIMES) if r() < 0.5 else ""
    if k == 0:
        s = f"{np()} {c(VERBS)} {np()}{t}."
    elif k == 1:
        s = f"{np()} {c(ADV)} {c(VERBS)} {np()} near the {c(PLACES)}{t}."
    elif k == 2:
        s = f"there was a {c(ADJ)} {c(NOUNS)} in the {c(PLACES)}, and {np()} {c(VERBS)} it{t}."
    elif k == 3:
        s = f"when {np()} {c(VERBS)} {np()}, {np()} {c(VERBS)} the {c(NOUNS)}."
    elif k == 4:
        s = f"{np()} and {np()} {c(VERBS)} the {c(PLACES)}{t}."
    elif k == 5:
        s = f"nobody in the {c(PLACES)} {c(VERBS)} {np()}, but {np()} {c(ADV)} {c(VERBS)} it."
    elif k == 6:
        s = f"it was a {c(ADJ)} day, so {np()} {c(VERBS)} {np()}{t}."
    else:
        s = f"{np()} from the {c(PLACES)} {c(VERBS)} a {c(ADJ)} {c(NOUNS)} with {np()}."
    return s[0].upper() + s[1:]


def paragraph(rng, n=None):
    n = n or 2 + int(rng.random() * 5)
    return " ".join(sentence(rng) for _ in range(n)) + "\n"
