"""What is looked at after training: curves, tables, maps of users, matrices.

Nothing of the library imports these modules by itself: they need scikit-learn
and matplotlib, which TFF does not bring. Figures are PNG files, drawn without a
screen and without touching the caller's settings of matplotlib.
"""
