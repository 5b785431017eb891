"""BibTeX of the papers whose methods this is."""

GS_INFONCE = """
@inproceedings{wu-etal-2022-smoothed,
    title = "Smoothed Contrastive Learning for Unsupervised Sentence Embedding",
    author = "Wu, Xing and Gao, Chaochen and Su, Yipeng and Han, Jizhong and Wang, Zhongyuan and Hu, Songlin",
    booktitle = "Proceedings of the 29th International Conference on Computational Linguistics",
    year = "2022",
    pages = "4902--4906",
    url = "https://aclanthology.org/2022.coling-1.434",
}
"""

SIMCSE = """
@inproceedings{gao-etal-2021-simcse,
    title = "{S}im{CSE}: Simple Contrastive Learning of Sentence Embeddings",
    author = "Gao, Tianyu and Yao, Xingcheng and Chen, Danqi",
    booktitle = "Proceedings of the 2021 Conference on Empirical Methods in Natural Language Processing",
    year = "2021",
    pages = "6894--6910",
    url = "https://aclanthology.org/2021.emnlp-main.552",
}
"""

GRADCACHE = """
@inproceedings{gao-etal-2021-scaling,
    title = "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    author = "Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie",
    booktitle = "Proceedings of the 6th Workshop on Representation Learning for NLP (RepL4NLP-2021)",
    year = "2021",
    pages = "316--321",
    url = "https://aclanthology.org/2021.repl4nlp-1.31",
}
"""
