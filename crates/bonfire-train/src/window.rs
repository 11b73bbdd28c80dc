//! What each micro step counts in the gradient of its window; pure.
//!
//! A window is what one optimizer step sees: the micro steps of all ranks since the last one. With the weight `w`
//! (a number of items) and the mean gradient `g` of each micro step, its gradient is `sum of w * g / sum of w`, so
//! it is one device's, however items are spread over ranks and micro steps.
//!
//! ```text
//! on a rank    acc = sum of (w / unit) * g          unit: the weight of its first micro step with items
//!              sent = acc / (W / unit) * (W / max)  W: its sum of w; max: the largest W of all ranks
//! together     mean over ranks of sent
//! on a rank    divided by (N / (ranks * max))       N: the sum of W over ranks
//! ```
//!
//! What is sent is never much larger or smaller than a gradient, so that halves hold it; and with equal weights all
//! factors are 1 but the number of micro steps: then the result is bit for bit the plain mean.

use serde::{Deserialize, Serialize};

/// How the gradients of a window become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// The mean over all items of all ranks: what one device gives that sees the whole window at once.
    #[default]
    Mean,
    /// The sum over ranks of each rank's mean over its own items: with equal shares `world_size` times the mean.
    Sum,
}

/// A multiplication or division that is left out where it changes nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Scale {
    Keep,
    Divide(f64),
    Multiply(f64),
}

impl Scale {
    fn divide(divisor: f64) -> Self {
        if divisor == 1.0 { Self::Keep } else { Self::Divide(divisor) }
    }

    fn multiply(factor: f64) -> Self {
        if factor == 1.0 { Self::Keep } else { Self::Multiply(factor) }
    }

    fn then_multiply(self, factor: f64) -> Self {
        match self {
            _ if factor == 1.0 => self,
            Self::Keep => Self::multiply(factor),
            Self::Divide(divisor) => Self::Multiply(factor / divisor),
            Self::Multiply(first) => Self::Multiply(first * factor),
        }
    }
}

/// What a rank has in a window so far.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Weights {
    /// The weight of the first micro step that has items; 0 before it.
    pub(crate) unit: f64,
    /// The sum of weights.
    pub(crate) total: f64,
}

impl Weights {
    /// Counts a micro step; gives the factor of its gradient, none if it has no items.
    ///
    /// Without items there is no gradient to speak of: the mean over nothing is NaN.
    pub(crate) fn add(&mut self, weight: f64) -> Option<f64> {
        if weight == 0.0 {
            return None;
        }
        if self.unit == 0.0 {
            self.unit = weight;
        }
        self.total += weight;
        Some(weight / self.unit)
    }
}

/// What a rank does with its sum before and after the ranks take the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Scales {
    pub(crate) before: Scale,
    pub(crate) after: Scale,
    /// The sum of weights of all ranks.
    pub(crate) weight: f64,
}

/// The scales of `rank` if ranks have these `totals`; none if nobody has an item.
pub(crate) fn scales(own: Weights, totals: &[f64], reduction: Reduction) -> Option<Scales> {
    let weight: f64 = totals.iter().sum();
    let largest = totals.iter().copied().fold(0.0, f64::max);
    if weight == 0.0 {
        return None;
    }
    let num_ranks = totals.len() as f64;
    let own_mean = if own.total == 0.0 { Scale::Keep } else { Scale::divide(own.total / own.unit) };
    Some(match reduction {
        Reduction::Mean => Scales {
            before: own_mean.then_multiply(own.total / largest),
            after: Scale::divide(weight / (num_ranks * largest)),
            weight,
        },
        Reduction::Sum => Scales { before: own_mean, after: Scale::multiply(num_ranks), weight },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn apply(scale: Scale, value: f64) -> f64 {
        match scale {
            Scale::Keep => value,
            Scale::Divide(divisor) => value / divisor,
            Scale::Multiply(factor) => value * factor,
        }
    }

    /// The window of ranks with micro steps of (weight, gradient), and the scales of rank 0.
    fn window(ranks: &[&[(f64, f64)]], reduction: Reduction) -> Option<(f64, Scales)> {
        let sums: Vec<(Weights, f64)> = ranks
            .iter()
            .map(|steps| {
                let mut weights = Weights::default();
                let sum = steps.iter().filter_map(|&(w, g)| weights.add(w).map(|factor| factor * g)).sum();
                (weights, sum)
            })
            .collect();
        let totals: Vec<f64> = sums.iter().map(|(weights, _)| weights.total).collect();
        let all: Option<Vec<Scales>> = sums.iter().map(|&(own, _)| scales(own, &totals, reduction)).collect();
        let all = all?;
        let sent = sums.iter().zip(&all).map(|((_, sum), scales)| apply(scales.before, *sum));
        Some((apply(all[0].after, sent.sum::<f64>() / ranks.len() as f64), all[0]))
    }

    #[test]
    fn a_mean_of_means_with_unequal_shares_is_not_what_comes_out() {
        // y = wx, w = 0, x = 1..=8, target 2x: the gradients of the means over 5 and 3 items.
        let (gradient, scales) = window(&[&[(5.0, -44.0)], &[(3.0, -596.0 / 3.0)]], Reduction::Mean).unwrap();
        assert!((gradient + 102.0).abs() < 1e-12, "{gradient}");
        assert_eq!(scales.weight, 8.0);
    }

    #[test]
    fn with_equal_weights_nothing_is_scaled_but_by_the_number_of_micro_steps() {
        let (_, scales) = window(&[&[(50.0, 1.0)], &[(50.0, 2.0)], &[(50.0, 3.0)]], Reduction::Mean).unwrap();
        assert_eq!((scales.before, scales.after), (Scale::Keep, Scale::Keep));
        let three = &[(7.0, 1.0), (7.0, 1.0), (7.0, 1.0)][..];
        let (_, scales) = window(&[three, three], Reduction::Mean).unwrap();
        assert_eq!((scales.before, scales.after), (Scale::Divide(3.0), Scale::Keep));
    }

    #[test]
    fn a_sum_is_over_ranks_of_their_means() {
        let ranks: [&[(f64, f64)]; 2] = [&[(1.0, 1.0), (1.0, 3.0)], &[(1.0, 2.0), (1.0, 5.0)]];
        assert_eq!(window(&ranks, Reduction::Sum).unwrap().0, 5.5);
        assert_eq!(window(&ranks, Reduction::Mean).unwrap().0, 2.75);
    }

    #[test]
    fn a_rank_or_a_micro_step_without_items_counts_nothing_even_if_its_gradient_is_nan() {
        let (gradient, _) = window(&[&[(0.0, f64::NAN), (2.0, 3.0)], &[(0.0, f64::NAN)]], Reduction::Mean).unwrap();
        assert_eq!(gradient, 3.0);
        assert_eq!(window(&[&[(0.0, f64::NAN)], &[]], Reduction::Mean), None);
    }

    proptest! {
        #[test]
        fn any_spread_of_items_gives_the_weighted_mean(
            ranks in prop::collection::vec(prop::collection::vec((0u32..40, -1.0..1.0f64), 0..5), 1..5),
        ) {
            let ranks: Vec<Vec<(f64, f64)>> =
                ranks.into_iter().map(|steps| steps.into_iter().map(|(w, g)| (f64::from(w), g)).collect()).collect();
            let views: Vec<&[(f64, f64)]> = ranks.iter().map(Vec::as_slice).collect();
            let all = ranks.iter().flatten();
            let weight: f64 = all.clone().map(|(w, _)| w).sum();
            match window(&views, Reduction::Mean) {
                None => prop_assert_eq!(weight, 0.0),
                Some((gradient, _)) => {
                    let expected = all.map(|(w, g)| w * g).sum::<f64>() / weight;
                    prop_assert!((gradient - expected).abs() < 1e-12);
                }
            }
        }
    }
}
