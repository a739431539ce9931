"""Where requests keep keys, values and recurrent states: pages and slots, accounted for on the host."""
