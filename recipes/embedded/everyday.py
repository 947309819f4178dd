"""Prompts that people type on an ordinary day: sums, sentences to rewrite, advice, questions, further topics.

The second wave of the embedded draft's training prompts (`prompts.py` adds them after its own). All are combinations of the
lists below; the 64 held-out prompts in the package are not among them.
"""

from __future__ import annotations

import random
from itertools import product

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jack", "Kofi", "Lena", "Maria", "Nils")
THINGS = ("pencils", "oranges", "tickets", "notebooks", "eggs", "stamps", "bottles of water", "balloons", "chairs", "muffins")

SUMS = (
    "{n} has {a} {t} and gives away {b} of them. How many {t} are left?",
    "What is {p} percent of {a}0? Show how you get there.",
    "A car drives {a} kilometers per hour for {b} hours. How far does it go?",
    "{n} buys {b} {t} at {c} dollars each and pays with a {d} dollar bill. What is the change?",
    "Solve for x: {c}x + {b} = {a}.",
    "Solve the equation {c}x - {b} = {a} and check your answer.",
    "What is the area of a rectangle that is {a} cm long and {b} cm wide?",
    "What is the perimeter of a square with a side of {b} meters?",
    "Calculate {a} times {b} step by step.",
    "What is {a} divided by {c}? Give the remainder as well.",
    "The sum of two numbers is {a} and their difference is {b}. What are the numbers?",
    "A recipe for {c} people needs {a} grams of flour. How much is needed for {b} people?",
    "What is the average of {a}, {b} and {d}?",
    "Convert {a} kilometers to miles.",
    "Convert {a} degrees Celsius to Fahrenheit.",
    "{n} reads {b} pages a day. How long does a book of {d}0 pages take?",
    "What is the next number in the sequence {c}, {b}, {a}? Explain your guess.",
    "A shirt costs {a} dollars and is reduced by {p} percent. What does it cost now?",
    "If {c} machines make {a} {t} in an hour, how many {t} do {b} machines make in an hour?",
    "Write {a}/{d} as a decimal and as a percentage.",
)

SENTENCES = (
    "We was going to the park when it start raining.",
    "Your report is late again and I am not happy about it.",
    "The meeting got moved because lots of people could not make it.",
    "He bought the tickets, he forgot them at home, he had to go back.",
    "It is important to note that the results may in some cases not be entirely accurate.",
    "me and my brother has finish the work yesterday",
    "The weather was bad. The match was cancelled. Everyone went home.",
    "I think that maybe we could perhaps try to look at another option.",
    "The new phone is good because it has a good camera and a good battery.",
    "Please be advised that your application has been received and is being processed.",
    "There is many reasons why people likes to live in a small town.",
    "In the event that the elevator is out of order, please make use of the stairs.",
    "I can't come tomorrow, something came up, sorry!",
    "The cake was eaten by the children before the guests had arrived.",
    "She is knowing him since ten years and they was friends in school.",
    "The museum, which opened in 1954 and was renovated twice, attracts half a million visitors every year.",
    "Our company makes software that helps shops keep track of what they sell.",
    "The dog barked all night and nobody in the house could sleep.",
    "Scientists found that people who walk every day sleep better and feel less tired.",
    "The train was delayed for two hours because of snow on the tracks.",
    "If you want to learn the piano you must practise a little every day.",
    "The old bridge was closed in spring and will be replaced by a wider one next year.",
    "I want a refund, the shoes fell apart after a week.",
    "Thanks for the invite but I have to say no this time.",
)

REWRITES = (
    "Rewrite this more politely: {s}", "Correct any mistakes in this sentence: {s}", "Make this shorter: {s}",
    "Say this in simpler words: {s}", "Rewrite this in a friendly tone: {s}", "Turn this into a question: {s}",
    "Rewrite the following as a professional message: {s}", "Explain in one sentence what this says: {s}",
    "Give me three other ways to say this: {s}", "Write one more sentence that could follow: {s}",
    "Is this sentence positive, negative or neutral, and why? {s}", "Rewrite this in the past tense: {s}",
    "List the nouns and the verbs in this sentence: {s}", "Write a headline for this: {s}",
    "Rewrite this as if a pirate said it: {s}", "Expand this into a short paragraph: {s}",
)

SITUATIONS = (
    "make new friends in a new city", "stop biting my nails", "prepare for a first day at work", "cook on a small budget",
    "keep a diary", "train for a ten kilometer run", "clean a dirty oven", "calm a crying baby", "choose a good book",
    "say no without hurting anyone", "learn to swim as an adult", "get over a cold", "plan a birthday party",
    "study for an exam in two weeks", "keep my desk tidy", "save water at home", "get a stain out of a shirt",
    "talk to a neighbor about noise", "start a small garden", "wake up earlier", "give a good toast at a wedding",
    "write a better essay", "teach a child to read", "take better photos with a phone", "drink less coffee",
    "find a hobby", "deal with a difficult customer", "use less plastic", "stay focused while working at home",
    "travel with a dog", "make a good first impression", "improve my handwriting", "overcome a fear of flying",
    "choose a used bicycle", "write a thank-you note", "eat more vegetables", "relax after work", "pick a good password",
    "apologize to a friend", "organize a small library", "learn to juggle", "repair a dripping tap",
)

ADVICE = (
    "How can I {s}?", "What is the best way to {s}?", "Give me some tips on how to {s}.", "What should I avoid if I want to {s}?",
    "I would like to {s}. Where do I start?", "My friend wants to {s}. What would you tell her?",
    "Make a plan for one week to {s}.", "Why is it so hard to {s}?",
)

TOPICS = (
    "rainbows", "thunderstorms", "the ozone layer", "glaciers", "earth's magnetic field", "whales", "owls", "spiders", "ants",
    "honey", "salt", "chocolate", "cheese", "rice", "potatoes", "soap", "glass", "paper", "steel", "plastic", "clocks", "maps",
    "the compass", "the telephone", "radio", "television", "the steam engine", "bicycles", "submarines", "rockets", "satellites",
    "lasers", "batteries", "microscopes", "X-rays", "antibiotics", "blood", "bones", "muscles", "teeth", "skin", "the brain",
    "allergies", "fever", "first aid", "Leonardo da Vinci", "Marie Curie", "Isaac Newton", "Mozart", "Vincent van Gogh",
    "the Great Wall of China", "the pyramids", "the Vikings", "knights", "pirates", "the Middle Ages", "the Cold War",
    "money", "banks", "mortgages", "pensions", "contracts", "trade", "newspapers", "propaganda", "the alphabet", "proverbs",
    "sign language", "grammar", "translation", "essays", "novels", "opera", "drums", "the violin", "choirs", "painting",
    "sculpture", "pottery", "knitting", "origami", "magic tricks", "basketball", "tennis", "cycling", "judo", "skiing", "fishing",
    "horse riding", "mushrooms", "roses", "oak trees", "bamboo", "tides", "rivers", "islands", "caves", "the Sahara", "Japan",
    "Brazil", "Kenya", "Norway", "India", "Paris", "New York", "hotels", "weddings", "birthdays", "holidays", "neighbors",
    "grandparents", "teachers", "firefighters", "farmers", "pilots", "nurses", "lawyers", "architects", "logic", "philosophy",
    "ethics", "psychology", "habits", "humor", "trust", "loneliness", "noise", "traffic", "heating", "lighting", "furniture",
    "linked lists", "hash tables", "binary search", "regular expressions", "JSON", "web servers", "compilers", "threads",
    "spreadsheets", "SQL", "matrices", "vectors", "logarithms", "percentages", "averages", "graphs", "triangles", "circles",
)

QUESTIONS = (
    "What do you know about {t}?", "Who or what comes to your mind when you hear of {t}?",
    "Tell me something surprising about {t}.",
    "What are three common questions about {t}, and their answers?", "Why do people care about {t}?",
    "What is the history of {t}?", "Describe {t} to someone who has never heard of it.", "Give an example that involves {t}.",
    "What are the most important words to know about {t}?", "Is there anything dangerous about {t}?",
    "Let us talk about {t}. What do you think?", "Write a riddle about {t}.", "Write a short story that has {t} in it.",
    "Write a four-line poem about {t}.", "Name five things that have to do with {t}.",
    "Give me ideas for a school project on {t}.",
)


def sums(draw: random.Random) -> list[tuple[str, str]]:
    """Word problems and calculations over drawn numbers."""
    texts = {
        form.format(n=draw.choice(NAMES), t=draw.choice(THINGS), a=draw.randint(12, 96), b=draw.randint(3, 11),
                    c=draw.randint(2, 9), d=draw.choice((20, 50, 100)), p=draw.choice((5, 10, 20, 25, 30)))
        for form in SUMS for _ in range(20)
    }
    return [("math", text) for text in sorted(texts)]


def everyday(draw: random.Random) -> list[list[tuple[str, str]]]:
    """(kind, text) by kind, each list in a fixed order."""
    return [
        sums(draw),
        [("rewrite", form.format(s=sentence)) for form, sentence in product(REWRITES, SENTENCES)],
        [("advice", form.format(s=situation)) for form, situation in product(ADVICE, SITUATIONS)],
        [("facts", form.format(t=topic)) for form, topic in product(QUESTIONS, TOPICS)],
    ]
