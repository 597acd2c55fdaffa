"""Speed and memory over commits, for asv: `make bench`.

asv installs each commit into an environment of its own and runs these files, as they stand in the checkout, against
it. They import each other relatively (asv gives the folder a name of its own) and import what they measure inside
`setup`: a commit that lacks an engine raises `NotImplementedError` there, which asv records as n/a.
"""
