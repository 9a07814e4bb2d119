"""Analysis after training: curves, tables, maps of users, matrices.

The rest of the library never imports these modules: they need scikit-learn and
matplotlib, which TFF does not install. Figures are PNG files, drawn without a
display and without changing the caller's matplotlib settings.
"""
