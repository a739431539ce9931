"""The selection rule: the library against an independent float64 rule and the kept sets of the released kernel."""
