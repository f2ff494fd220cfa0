"""The mathematics of PACE, over tensors: it knows nothing of images, files or transformers.

gaussians   the concepts μ_k, Σ_k, by family          objective   L_e's Dirichlet part, L_f, L_s and their gradients
inference   φ and γ of a batch, by sweeps              statistics  what a pass over images leaves behind; adds up
learning    μ, Σ, α, H, β from statistics; E-steps     seeding     where the concepts start
feeding     which images are worked on together        nesting     parts and kinds; parting, where these start;
                                                       refining_kinds, what shapes them for the prediction
"""
