"""The attention function of all heads, how models of other libraries call it, capture and gates."""
