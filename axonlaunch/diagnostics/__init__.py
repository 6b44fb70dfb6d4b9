"""What running ranks are doing: hangs, stragglers, collectives."""
