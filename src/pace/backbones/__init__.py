"""From images to tokens: one `Backbone` for the vision transformers of every library."""

from pace.backbones.backbone import Backbone
from pace.backbones.finetuning import finetune, load_finetuned, save_finetuned
from pace.backbones.heads import fit_head, linear_probe, zero_shot, zero_shot_from_names
from pace.backbones.layers import choose_layer, kept_share
from pace.backbones.loading import ModelChoice, load, open_backbone, open_model, usual_device
from pace.backbones.preprocessing import Preprocessing
from pace.backbones.tower import Look, Model, Sizes, Tower

__all__ = [
    "Backbone",
    "Look",
    "Model",
    "ModelChoice",
    "Preprocessing",
    "Sizes",
    "Tower",
    "choose_layer",
    "finetune",
    "fit_head",
    "kept_share",
    "linear_probe",
    "load",
    "load_finetuned",
    "open_backbone",
    "open_model",
    "save_finetuned",
    "usual_device",
    "zero_shot",
    "zero_shot_from_names",
]
