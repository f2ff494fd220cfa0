import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

from pace import classifiers

RNG = np.random.default_rng(0)
FEATURES = RNG.dirichlet(np.full(8, 0.5), 300)
LABELS = (FEATURES @ RNG.normal(size=(8, 4)) * 6).argmax(1)


def test_regressions_fitted_together_are_the_minima_that_scikit_learn_finds_one_by_one():
    features, targets = torch.tensor(StandardScaler().fit_transform(FEATURES)), torch.tensor(LABELS)
    cases = [(penalty, torch.arange(300) % 3 != fold) for penalty in (1.0, 1e-2, 1e-3, 1e-5) for fold in range(3)]
    learns = torch.stack([rows for _, rows in cases])
    together = classifiers._minimise(features, targets, learns, features.new_tensor([penalty for penalty, _ in cases]))
    for (penalty, rows), ours in zip(cases, together, strict=True):
        model = LogisticRegression(C=1 / (penalty * 200), tol=1e-8, max_iter=10_000)
        theirs = model.fit(features[rows].numpy(), LABELS[rows.numpy()])
        weights = torch.tensor(np.vstack([theirs.coef_.T, theirs.intercept_]))

        def cost(weights, rows=rows, penalty=penalty):
            entropy = torch.nn.functional.cross_entropy(classifiers._logits(features[rows], weights), targets[rows])
            return float(entropy + penalty / 2 * weights[:-1].square().sum())

        assert cost(ours) < cost(weights) + 1e-4
        if penalty >= 1e-3:  # where it is weaker, many weights are as good
            found = classifiers._logits(features, ours).softmax(1).numpy()
            np.testing.assert_allclose(found, theirs.predict_proba(features.numpy()), atol=2e-3)


def test_a_class_that_a_fold_never_sees_does_not_break_the_others():
    labels = np.array([0, 1] * 30 + [2])
    classify = classifiers.logistic_regression(np.c_[labels == 0, RNG.normal(size=61)], labels)
    assert (classify(np.c_[labels == 0, np.zeros(61)])[:60] == labels[:60]).all()


def test_folds_have_the_same_share_of_every_class():
    fold = classifiers._folds(torch.tensor(LABELS), 3, seed=0).numpy()
    counts = np.array([np.bincount(LABELS[fold == number], minlength=4) for number in range(3)])
    assert np.ptp(counts, axis=0).max() <= 1


def test_a_classifier_answers_with_the_labels_it_was_given():
    names = np.array([70, -1, 12, 5])
    classify = classifiers.logistic_regression(FEATURES[:200], names[LABELS[:200]])
    assert (classify(FEATURES[200:]) == names[LABELS[200:]]).mean() > 0.9


def test_the_ridge_regression_is_scikit_learns():
    x, y = StandardScaler().fit_transform(FEATURES), FEATURES @ RNG.normal(size=(8, 3)) + RNG.normal(size=(300, 3))
    (ours,) = classifiers._ridges(torch.tensor(x), torch.tensor(y), [0.1])
    theirs = Ridge(alpha=0.1 * 300).fit(x, y)
    np.testing.assert_allclose(ours(torch.tensor(x)).numpy(), theirs.predict(x), atol=1e-8)


def test_the_ridge_regression_learns_what_is_there_and_leaves_noise_alone():
    numbers = FEATURES @ RNG.normal(size=(8, 3))
    predict = classifiers.ridge_regression(FEATURES[:200], numbers[:200])
    np.testing.assert_allclose(predict(FEATURES[200:]), numbers[200:], atol=1e-3)
    noise = RNG.normal(size=(40, 3))
    blind = classifiers.ridge_regression(RNG.normal(size=(40, 60)), noise)
    assert np.abs(blind(RNG.normal(size=(40, 60))) - noise.mean(0)).max() < 0.5
