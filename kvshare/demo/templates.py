"""
The fixed text of the three kinds of form, and what may stand in their slots.

Owns every word that a sheet is made of. Knows nothing of values, questions or the model.
A record is written as short lines that repeat its ordinal label, so that a fact can be read
from its own line together with a label that no edit ever touches.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberField:
    """A slot that holds a number from 10 to 99, with the range its kind calls ordinary."""

    name: str
    lowest_ordinary: int
    highest_ordinary: int


@dataclass(frozen=True, slots=True)
class WordField:
    """A slot that holds one word of a closed list."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of form: the boilerplate around the slots, and the slots in order."""

    kind: str
    label: str
    """The noun that anchors a record, as in "Report 2"."""
    person: str
    """What the named person of a record is called, and the name of that slot."""
    word_field: WordField
    number_fields: tuple[NumberField, ...]
    verdicts: tuple[str, str, str]
    """What a number is called below, inside and above its ordinary range."""
    remarks: tuple[str, ...]
    opening: str
    record_opening: str
    record_middle: str
    record_closing: str
    closing: str


SYSTEM_MESSAGE = (
    "You answer questions about the forms in the message of the user. "
    "Read the form and answer with the value alone."
)

FIRST_NAMES = (
    "Anna",
    "Boris",
    "Clara",
    "David",
    "Elena",
    "Felix",
    "Greta",
    "Henry",
    "Irene",
    "Jonas",
    "Karin",
    "Leon",
    "Maria",
    "Nils",
    "Olga",
    "Peter",
    "Rosa",
    "Simon",
    "Tanya",
    "Victor",
    "Wanda",
    "Yusuf",
    "Zoe",
    "Amir",
    "Bella",
    "Carlos",
    "Dora",
    "Erik",
    "Fiona",
    "Gustav",
    "Hanna",
    "Ivan",
)
LAST_NAMES = (
    "Adler",
    "Becker",
    "Costa",
    "Dietz",
    "Eriksen",
    "Fischer",
    "Garcia",
    "Hansen",
    "Ito",
    "Jensen",
    "Keller",
    "Larsen",
    "Moreau",
    "Novak",
    "Okafor",
    "Petrov",
    "Quinn",
    "Rossi",
    "Silva",
    "Tanaka",
    "Unger",
    "Vogel",
    "Weber",
    "Xu",
    "Yilmaz",
    "Ziegler",
    "Brandt",
    "Cohen",
    "Duran",
    "Engel",
    "Fuchs",
    "Gomez",
)

LAB = Template(
    kind="lab",
    label="Report",
    person="patient",
    word_field=WordField(
        "ward",
        (
            "cardiology",
            "surgery",
            "maternity",
            "oncology",
            "urology",
            "geriatrics",
            "pediatrics",
            "dialysis",
        ),
    ),
    number_fields=(
        NumberField("sodium", 35, 60),
        NumberField("potassium", 30, 52),
        NumberField("glucose", 42, 70),
        NumberField("calcium", 48, 76),
        NumberField("iron", 38, 64),
    ),
    verdicts=("low", "normal", "high"),
    remarks=(
        "The sample was slightly cloudy but could be used.",
        "The patient had eaten shortly before the blood was drawn.",
        "A second sample was asked for and has not yet arrived.",
        "Nothing unusual was seen under the microscope.",
        "The tube was filled a little short of the mark.",
        "The ward was told about the result by telephone.",
        "The measurement was repeated once with the same outcome.",
        "Please compare with the letter of the family doctor.",
        "The sample came late in the evening and was kept cold.",
        "The patient takes a new medicine since last week.",
    ),
    opening=(
        "Central laboratory, sheet of released reports\n"
        "The reports on this sheet were checked by the physician on duty and released together. "
        "Each report belongs to one patient of the hospital. All values are given in the units of "
        "the house, so that they can be compared without a table. The normal range of the house "
        "is printed beside each value. A value below the range is low, a value above the range "
        "is high, and a value inside the range, both ends included, is normal."
    ),
    record_opening=(
        "Report {n} begins here. It was printed for the treating physician and is confidential. "
        "If you are not the treating physician, hand it back to the laboratory."
    ),
    record_middle=(
        "The blood was drawn in the morning by a trained nurse and brought to the laboratory "
        "within the hour. The measurement followed the standard procedure of the house, and the "
        "control sample of the day was inside its limits."
    ),
    record_closing=(
        "Report {n} ends here. The values above were measured twice and the mean was written "
        "down. Questions about the method are answered by the laboratory during the day."
    ),
    closing=(
        "This sheet is kept for ten years in the archive of the hospital. It replaces no "
        "medical examination. Please tell the laboratory if a name or a value on it looks wrong, "
        "so that the sample can be measured again while it is still in the cold store. "
        "A copy goes to the family doctor only when the patient has agreed in writing. The "
        "laboratory takes part in the yearly comparison of all laboratories of the country and "
        "has passed it each time. Whoever finds this sheet outside the hospital is asked to send "
        "it back without reading it, and will be paid for the stamp."
    ),
)

EXAM = Template(
    kind="exam",
    label="Exam",
    person="student",
    word_field=WordField(
        "room",
        (
            "library",
            "theatre",
            "chapel",
            "gymnasium",
            "studio",
            "annex",
            "pavilion",
            "cellar",
        ),
    ),
    number_fields=(
        NumberField("algebra", 40, 68),
        NumberField("geometry", 36, 62),
        NumberField("physics", 44, 70),
        NumberField("chemistry", 38, 66),
        NumberField("biology", 46, 74),
    ),
    verdicts=("weak", "fair", "strong"),
    remarks=(
        "The student asked for more paper twice.",
        "The student came a few minutes late and was let in.",
        "One page was torn and has been copied by the office.",
        "The handwriting is hard to read in the second part.",
        "The student left the room once with the supervisor.",
        "A drawing was handed in on a separate page.",
        "The last question was answered only in part.",
        "The student used a dictionary, which was allowed.",
        "The marks were read out to the student on request.",
        "Nothing unusual happened during the examination.",
    ),
    opening=(
        "Examination office, sheet of marked exams\n"
        "The exams on this sheet were written on the same day and marked by two teachers who did "
        "not know the names. Each exam belongs to one student of the school. Marks are given in "
        "points, and no subject has more than a hundred of them. The fair range of a subject is "
        "printed beside each mark. A mark below the range is weak, a mark above the range is "
        "strong, and a mark inside the range, both ends included, is fair."
    ),
    record_opening=(
        "Exam {n} begins here. It was marked by hand and entered by the office. "
        "If a mark is missing, ask the office before you write to the student."
    ),
    record_middle=(
        "The exam was written under supervision and took four hours with one break. Books and "
        "telephones stayed outside the room, and the questions were drawn from the list that "
        "every school of the district received in spring."
    ),
    record_closing=(
        "Exam {n} ends here. The marks above were agreed by both teachers and cannot be changed "
        "without a written request. The paper itself can be seen in the office on any day."
    ),
    closing=(
        "This sheet is kept in the office until the student leaves the school. It is no "
        "certificate. Please tell the office if a name or a mark on it looks wrong, so that the "
        "paper can be read again while both teachers are still at hand. A copy goes to the parents "
        "only when the student is not yet of age. The school takes part in the yearly comparison "
        "of all schools of the country and has done well in it each time. Whoever finds this "
        "sheet outside the office is asked to send it back without reading it, and will be paid "
        "for the stamp."
    ),
)

TICKET = Template(
    kind="ticket",
    label="Ticket",
    person="customer",
    word_field=WordField(
        "product",
        (
            "router",
            "printer",
            "scanner",
            "monitor",
            "tablet",
            "camera",
            "speaker",
            "keyboard",
        ),
    ),
    number_fields=(
        NumberField("delay", 30, 58),
        NumberField("outage", 34, 64),
        NumberField("traffic", 40, 68),
        NumberField("errors", 36, 60),
        NumberField("devices", 42, 72),
    ),
    verdicts=("small", "usual", "large"),
    remarks=(
        "The customer would like to be called back in the afternoon.",
        "The customer has already switched the device off and on.",
        "A spare part was ordered and has not yet arrived.",
        "The fault appears only when it rains.",
        "A colleague has seen the same fault last week.",
        "The customer sent three pictures of the lights.",
        "The fault went away by itself and came back.",
        "Please speak slowly, the line is bad.",
        "The customer is content with the help so far.",
        "The device was bought from another shop.",
    ),
    opening=(
        "Help desk, sheet of open tickets\n"
        "The tickets on this sheet were opened by telephone and are handed over to the next "
        "shift. Each ticket belongs to one customer of the company. All figures were read from "
        "the device by the agent and are counted from the day the ticket was opened. The usual "
        "range is printed beside each figure. A figure below the range is small, a figure above "
        "the range is large, and a figure inside the range, both ends included, is usual."
    ),
    record_opening=(
        "Ticket {n} begins here. It was written down while the customer was on the line. "
        "If something is not clear, call the customer before you send a technician."
    ),
    record_middle=(
        "The customer was asked for the name and the age, as the contract demands, and agreed "
        "that the call was recorded. The agent went through the list of simple remedies first, "
        "and none of them helped for longer than a day."
    ),
    record_closing=(
        "Ticket {n} ends here. The figures above are read again before the ticket is closed. "
        "The customer receives a letter when the fault is found, and a bill only after repair."
    ),
    closing=(
        "This sheet is thrown away when all tickets on it are closed. It is no contract. Please "
        "tell the shift leader if a name or a figure on it looks wrong, so that the customer can "
        "be asked again while the matter is still fresh. A copy goes to the technician only when "
        "a visit has been agreed. The company takes part in the yearly comparison of all help "
        "desks of the country and has done well in it each time. Whoever finds this sheet "
        "outside the building is asked to send it back without reading it, and will be paid for "
        "the stamp."
    ),
)

TEMPLATES = (LAB, EXAM, TICKET)
AGES = range(18, 90)
NUMBERS = range(10, 100)
