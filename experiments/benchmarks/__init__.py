"""Speed and memory over commits, for asv: `make bench`.

asv installs each commit into a separate environment and runs these files, as they are in the checkout, against
it. They import each other relatively (asv gives the folder its own name) and import what they measure inside
`setup`: a commit that lacks an engine raises `NotImplementedError` there, which asv records as n/a.
"""
