"""Why a step is wrong: mutations of the recorded program, and hypotheses, held against what was observed."""
