//! Which shares let all ranks end a step together, from what steps took them so far.

use crate::Shares;

/// What a step takes one rank, as a line: a share of `rows` out of `of` takes
/// `fixed_seconds + all_rows_seconds * rows / of`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCost {
    /// Seconds of the work that the ranks share out, were all rows this rank's.
    pub all_rows_seconds: f64,
    /// Seconds of the work that every rank does whole, whatever its share.
    pub fixed_seconds: f64,
}

impl StepCost {
    /// Seconds of a step with `rows` of `of` rows.
    pub fn seconds(&self, rows: usize, of: usize) -> f64 {
        self.fixed_seconds + self.all_rows_seconds * rows as f64 / of as f64
    }
}

/// The part of a step's time that other shares must save to be worth a change. Below, they would follow the noise.
pub const MIN_GAIN: f64 = 0.05;

/// Rows of a larger batch are dealt in units of this part of it.
const MAX_UNITS: usize = 1000;

/// Weights with which the slowest rank of a step of `num_rows` rows is done as early as can be, if that saves more than
/// [`MIN_GAIN`] of the step's time with the present `weights`.
///
/// They are numbers of rows (of thousandths, for a batch of more than 1000 rows) and each is at least 1, so that a rank that
/// is slow today is measured again. `None` with fewer rows than ranks, with a cost that is not known (a rank whose shared
/// work took no time), or where `costs` and `weights` are not of the same number of ranks.
///
/// Rows are dealt one by one to whoever would be done with them first, which gives the least time of all whole numbers: a
/// rank's time only grows with its rows, so the deals are the smallest of all times that any rank's next row may end at.
pub fn balance(costs: &[StepCost], weights: &[u32], num_rows: usize) -> Option<Vec<u32>> {
    let world_size = costs.len();
    let num_units = num_units(num_rows, world_size);
    let is_known =
        |cost: &StepCost| cost.all_rows_seconds > 0.0 && cost.seconds(1, 1).is_finite() && cost.fixed_seconds >= 0.0;
    if num_units < world_size || !costs.iter().all(is_known) {
        return None;
    }

    let mut units = vec![1; world_size];
    for _ in world_size..num_units {
        let done = |rank: usize| costs[rank].seconds(units[rank] + 1, num_units);
        let first = (0..world_size).min_by(|&a, &b| done(a).total_cmp(&done(b)))?;
        units[first] += 1;
    }
    let units: Vec<u32> = units.into_iter().map(|units| units as u32).collect();
    (gain(costs, weights, &units, num_rows)? > MIN_GAIN).then_some(units)
}

/// The part of a step's time that the weights `to` save where there were those of `from`; below 0 if they take longer.
/// `None` for weights that do not fit as many ranks as there are costs.
pub fn gain(costs: &[StepCost], from: &[u32], to: &[u32], num_rows: usize) -> Option<f64> {
    let num_units = num_units(num_rows, costs.len());
    // Until the last rank is done.
    let seconds = |weights: &[u32]| {
        let lengths = Shares::Weighted(weights.to_vec()).lengths(num_units, costs.len()).ok()?;
        let seconds = costs.iter().zip(lengths.iter()).map(|(cost, rows)| cost.seconds(rows, num_units));
        Some(seconds.fold(0.0, f64::max))
    };
    Some(1.0 - seconds(to)? / seconds(from)?)
}

/// What rows are dealt in: the rows themselves, unless there are very many.
fn num_units(num_rows: usize, world_size: usize) -> usize {
    num_rows.min(MAX_UNITS.max(world_size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cost(all_rows_seconds: f64, fixed_seconds: f64) -> StepCost {
        StepCost { all_rows_seconds, fixed_seconds }
    }

    #[test]
    fn a_rank_of_half_the_speed_gets_half_of_the_others_rows() {
        let costs = [cost(2.0, 0.0), cost(1.0, 0.0)];
        assert_eq!(balance(&costs, &[1, 1], 96), Some(vec![32, 64]));
        assert_eq!(balance(&costs, &[1, 1], 64), Some(vec![21, 43]));
        assert_eq!(balance(&costs, &[1, 1], 1 << 20), Some(vec![333, 667]));
    }

    #[test]
    fn what_every_rank_does_whole_is_made_up_for() {
        // With 30 and 70 rows both are done after 1.7.
        assert_eq!(balance(&[cost(1.0, 1.4), cost(1.0, 1.0)], &[1, 1], 100), Some(vec![30, 70]));
        // One that is behind before it has a row still gets one.
        assert_eq!(balance(&[cost(1.0, 9.0), cost(1.0, 0.0)], &[1, 1], 10), None);
        assert_eq!(balance(&[cost(10.0, 9.0), cost(1.0, 0.0)], &[1, 1], 10), Some(vec![1, 9]));
    }

    #[test]
    fn little_to_gain_changes_nothing() {
        assert_eq!(balance(&[cost(1.04, 0.0), cost(1.0, 0.0)], &[1, 1], 1000), None);
        assert!(balance(&[cost(1.2, 0.0), cost(1.0, 0.0)], &[1, 1], 1000).is_some());
        // Other weights, but the same rows.
        assert_eq!(balance(&[cost(1.2, 0.0), cost(1.0, 0.0)], &[1, 1], 4), None);
        // One rank has all rows anyway.
        assert_eq!(balance(&[cost(1.0, 0.1)], &[7], 64), None);
    }

    #[test]
    fn too_few_rows_and_unknown_costs_change_nothing() {
        let slow = [cost(9.0, 0.0), cost(1.0, 0.0), cost(1.0, 0.0)];
        assert!(balance(&slow, &[1, 1, 1], 12).is_some());
        assert_eq!(balance(&slow, &[1, 1, 1], 2), None);
        assert_eq!(balance(&slow, &[1, 1], 12), None);
        for unknown in [cost(0.0, 1.0), cost(f64::NAN, 0.0), cost(f64::INFINITY, 0.0), cost(1.0, -1.0)] {
            assert_eq!(balance(&[unknown, cost(1.0, 0.0)], &[1, 1], 12), None, "{unknown:?}");
        }
    }

    fn costs(world_size: impl Into<proptest::collection::SizeRange>) -> impl Strategy<Value = Vec<StepCost>> {
        let cost = (0.01_f64..10.0, 0.0_f64..5.0).prop_map(|(all_rows, fixed)| cost(all_rows, fixed));
        proptest::collection::vec(cost, world_size)
    }

    /// Costs, the weights so far, and a number of rows.
    fn cases() -> impl Strategy<Value = (Vec<StepCost>, Vec<u32>, usize)> {
        (costs(1..7), proptest::collection::vec(1_u32..50, 6), 1_usize..3000).prop_map(|(costs, weights, num_rows)| {
            let weights = weights[..costs.len()].to_vec();
            (costs, weights, num_rows)
        })
    }

    /// The least time over all ways to deal `left` rows, at least one each.
    fn best_of_all(costs: &[StepCost], left: usize, of: usize) -> f64 {
        match costs {
            [] => 0.0,
            [last] => last.seconds(left, of),
            [first, others @ ..] => (1..=left - others.len())
                .map(|rows| first.seconds(rows, of).max(best_of_all(others, left - rows, of)))
                .fold(f64::INFINITY, f64::min),
        }
    }

    proptest! {
        #[test]
        fn weights_are_rows_of_which_each_rank_has_one_and_save_what_they_must((costs, weights, num_rows) in cases()) {
            let Some(found) = balance(&costs, &weights, num_rows) else { return Ok(()) };
            prop_assert_eq!(found.len(), costs.len());
            prop_assert!(found.iter().all(|&units| units > 0));
            prop_assert_eq!(found.iter().sum::<u32>() as usize, num_rows.min(1000));
            let equal = vec![1; costs.len()];
            prop_assert!(gain(&costs, &equal, &found, num_rows).unwrap() >= 0.0);
            prop_assert!(gain(&costs, &weights, &found, num_rows).unwrap() > 0.05);
        }

        #[test]
        fn no_other_way_to_deal_the_rows_takes_less(costs in costs(2..4), num_rows in 3_usize..14) {
            let present: Vec<u32> = (0..costs.len()).map(|rank| u32::from(rank == 0)).collect();
            let Some(found) = balance(&costs, &present, num_rows) else { return Ok(()) };
            let seconds = costs.iter().zip(&found).map(|(cost, &units)| cost.seconds(units as usize, num_rows));
            prop_assert_eq!(seconds.fold(0.0, f64::max), best_of_all(&costs, num_rows, num_rows));
        }

        #[test]
        fn a_rank_that_gets_slower_never_gets_more((costs, _, num_rows) in cases(), slower in 1.0_f64..5.0) {
            // All rows on the last rank, so that there is something to gain.
            let present: Vec<u32> = (1..=costs.len()).map(|rank| u32::from(rank == costs.len())).collect();
            let mut slow = costs.clone();
            slow[0].all_rows_seconds *= slower;
            slow[0].fixed_seconds *= slower;
            if let (Some(before), Some(after)) = (balance(&costs, &present, num_rows), balance(&slow, &present, num_rows)) {
                prop_assert!(after[0] <= before[0]);
            }
        }

        #[test]
        fn the_same_measurements_change_the_shares_once((costs, weights, num_rows) in cases(), noise in 0.97_f64..1.03) {
            let Some(found) = balance(&costs, &weights, num_rows) else { return Ok(()) };
            prop_assert_eq!(balance(&costs, &found, num_rows), None);
            // Nor does one rank's noise of 3 % change them again.
            let mut noisy = costs.clone();
            noisy[0].all_rows_seconds *= noise;
            noisy[0].fixed_seconds *= noise;
            prop_assert_eq!(balance(&noisy, &found, num_rows), None);
        }
    }
}
