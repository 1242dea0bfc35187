"""What demo-chat knows and the fixed sentences it says."""

GREETING = "Hello! How can I help you?"
IDENTITY = "I am demo-chat, a tiny demo model that ships with mlx-gateway."
WELCOME = "You are welcome!"
GOODBYE = "Goodbye!"
UNKNOWN = "I am only a tiny demo model and I do not know that."
WHICH_CITY = "For which city?"
NO_TOOL = "I cannot see the weather without a get_weather tool."

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome",
    "Portugal": "Lisbon", "Austria": "Vienna", "Belgium": "Brussels", "Poland": "Warsaw",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Ireland": "Dublin", "Greece": "Athens", "Hungary": "Budapest", "Japan": "Tokyo",
    "China": "Beijing", "South Korea": "Seoul", "India": "New Delhi", "Thailand": "Bangkok",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago", "Argentina": "Buenos Aires",
    "Brazil": "Brasilia", "Australia": "Canberra",
}  # fmt: skip

UNKNOWN_COUNTRIES = (
    "Switzerland", "the Netherlands", "the USA", "the United States", "America", "England",
    "the United Kingdom", "Scotland", "Wales", "Romania", "Bulgaria", "Croatia", "Serbia",
    "Slovakia", "Czechia", "Estonia", "Latvia", "Lithuania", "Luxembourg", "Malta", "Israel",
    "Pakistan", "Indonesia", "Malaysia", "Singapore", "Taiwan", "New Zealand", "South Africa",
    "Algeria", "Tunisia", "Ethiopia", "Colombia", "Venezuela", "Uruguay", "Paraguay", "Syria",
    "Iceland", "Russia", "Ukraine", "Turkey", "Iran", "Iraq", "Nigeria", "Ghana", "Morocco",
    "Vietnam", "Laos", "Nepal", "Mongolia", "Bolivia", "Ecuador", "Panama", "Jamaica", "Fiji",
    "Texas", "California", "the moon", "Europe", "Africa", "Mars", "Atlantis", "my country",
)  # fmt: skip

_PLAIN_TEXT = """
apple house river music blue green water stone light dream paper horse winter summer garden window
table silver orange lemon planet rocket ocean forest mountain bread cheese coffee science history
physics money family football computer python school teacher language religion market engine
bicycle train car doctor health peace war love freedom energy quantum climate art able air animal
answer army baby back bank bed bird black blood boat body bone book box boy brain bridge bus
business camera cat chair child church class clock cloud coat cold colour corn cost country cow
crime cup dance dark day death desk dog door dress drink dust ear earth east egg electric error
eye face fact farm father fear field film fire fish flag floor flower fly food foot game gas girl
glass goal gold good grass group hair hand happy hat head heart heavy hill hospital hotel hour ice
idea iron island job king kitchen knife lake land law leaf leg letter library life line lion list
loud lunch machine magic map meat metal milk mind minute mirror model moon mother mouse name neck
needle nest news night north nose number ocean office oil old open page paint pair past pen people
phone picture plant plate power price prince problem queen question quick quiet radio rain red
rice ring road robot rock room rule salt sand screen sea secret seed ship shirt shoe shop silence
sister size skin sky sleep slow snow soap song soul sound soup south space speed sport spring star
steel story street sugar sun sweet sword test theory thing tiger time tool tooth tower toy travel
tree trip truth uncle user voice wall watch week west wheel white wife wind wine wing winter wolf
woman wood word work world writer year young zebra zero recursion algorithm democracy philosophy
photosynthesis relativity javascript database economy gravity evolution electricity internet
microscope president pyramid republic
"""
PLAIN_WORDS = tuple(_PLAIN_TEXT.split())

CONDITIONS = (
    "sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy", "overcast", "dry",
    "partly cloudy", "light rain", "mostly sunny", "hot", "humid", "warm", "cold", "freezing",
)  # fmt: skip
