"""A BERT masked language model from scratch, with a switch for every way in which the report's model differs."""
