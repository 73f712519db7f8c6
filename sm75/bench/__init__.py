"""How fast is a server, and how far is that from what the card's memory allows?

``client`` asks and takes times, ``prompts`` writes prompts of exact length that no cache knows,
``run`` repeats, ``stats`` sums up, ``roofline`` gives the ceiling, ``memory`` measures the card.
"""
