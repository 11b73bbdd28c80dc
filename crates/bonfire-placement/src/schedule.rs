use crate::{PlacementError, Shares};

/// Shares that change between steps, as they were recorded or are to be replayed.
///
/// ```
/// use bonfire_placement::{ShareChange, ShareSchedule};
///
/// // Of 64 rows 32 each, then 21 and 43 from the eleventh step on.
/// let schedule = ShareSchedule {
///     changes: vec![
///         ShareChange { step: 0, weights: vec![1, 1] },
///         ShareChange { step: 10, weights: vec![21, 43] },
///     ],
/// };
/// schedule.validate(2)?;
/// assert_eq!(schedule.weights_after(9), Some(&[1, 1][..]));
/// assert_eq!(schedule.weights_after(10), Some(&[21, 43][..]));
/// # Ok::<(), bonfire_placement::PlacementError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct ShareSchedule {
    /// By rising step. Before the first one hold whatever shares the ranks started with.
    pub changes: Vec<ShareChange>,
}

/// From when on which shares hold.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct ShareChange {
    /// How many steps have ended by then; 0 for the start.
    pub step: u64,
    /// One per rank, as in [`Shares::Weighted`].
    pub weights: Vec<u32>,
}

impl ShareSchedule {
    /// Checks the order of the changes, and each one's weights.
    ///
    /// # Errors
    ///
    /// - [`PlacementError::ChangeOrder`]: steps do not rise.
    /// - [`PlacementError::Change`]: a change's weights are not those of `world_size` ranks.
    pub fn validate(&self, world_size: usize) -> Result<(), PlacementError> {
        for pair in self.changes.windows(2) {
            let (previous, step) = (pair[0].step, pair[1].step);
            if step <= previous {
                return Err(PlacementError::ChangeOrder { previous, step });
            }
        }
        for change in &self.changes {
            let fits = Shares::Weighted(change.weights.clone()).validate(world_size);
            fits.map_err(|reason| PlacementError::Change { step: change.step, reason: Box::new(reason) })?;
        }
        Ok(())
    }

    /// The weights that hold once `num_steps` steps have ended; `None` before the first change.
    pub fn weights_after(&self, num_steps: u64) -> Option<&[u32]> {
        let num_changes = self.changes.partition_point(|change| change.step <= num_steps);
        num_changes.checked_sub(1).map(|last| &*self.changes[last].weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(changes: &[(u64, &[u32])]) -> ShareSchedule {
        let change = |&(step, weights): &(u64, &[u32])| ShareChange { step, weights: weights.to_vec() };
        ShareSchedule { changes: changes.iter().map(change).collect() }
    }

    #[test]
    fn a_change_holds_until_the_next_one() {
        let schedule = schedule(&[(2, &[1, 2]), (3, &[2, 1]), (7, &[0, 1])]);
        schedule.validate(2).unwrap();
        let expected: [Option<&[u32]>; 5] = [None, Some(&[1, 2]), Some(&[2, 1]), Some(&[2, 1]), Some(&[0, 1])];
        assert_eq!([1, 2, 3, 6, 1000].map(|num_steps| schedule.weights_after(num_steps)), expected);
        assert_eq!(ShareSchedule::default().weights_after(0), None);
        ShareSchedule::default().validate(5).unwrap();
    }

    #[test]
    fn a_bad_schedule_is_an_error_that_names_the_step() {
        let change = |step, reason| PlacementError::Change { step, reason: Box::new(reason) };
        for (changes, expected) in [
            (schedule(&[(4, &[1, 2]), (4, &[2, 1])]), PlacementError::ChangeOrder { previous: 4, step: 4 }),
            (
                schedule(&[(0, &[1, 2]), (9, &[2, 1]), (5, &[1, 1])]),
                PlacementError::ChangeOrder { previous: 9, step: 5 },
            ),
            (
                schedule(&[(0, &[1, 2]), (6, &[1, 2, 3])]),
                change(6, PlacementError::WeightCount { num_weights: 3, world_size: 2 }),
            ),
            (schedule(&[(3, &[0, 0])]), change(3, PlacementError::ZeroWeights { world_size: 2 })),
        ] {
            assert_eq!(changes.validate(2), Err(expected));
        }
        let message = schedule(&[(3, &[0, 0])]).validate(2).unwrap_err().to_string();
        assert!(message.contains("step 3") && message.contains("all 2 ranks are 0"), "{message}");
    }
}
