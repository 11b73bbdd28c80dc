//! One view of both kinds of loaders: windows of micro steps, with what each of them weighs.

use std::{collections::VecDeque, sync::Arc};

use burn::{
    data::dataloader::{DataLoader, DataLoaderIterator},
    tensor::backend::Backend,
};

use crate::{LoaderHandle, MicroStep, PlainBatches, PlainShare, TrainError};

/// A loader of this rank's batches.
pub(super) enum Loader<B: Backend, O> {
    Plain {
        share: PlainShare<B, O>,
        /// Of all ranks.
        num_items: usize,
        accumulation_steps: usize,
    },
    Planned {
        loader: Arc<dyn DataLoader<B, O>>,
        handle: LoaderHandle,
    },
}

impl<B: Backend, O: 'static> Loader<B, O> {
    /// The next epoch.
    ///
    /// # Errors
    ///
    /// [`TrainError::Setting`] if the training was given another loader than the one whose plan it follows.
    pub(super) fn start_epoch(&self) -> Result<Batches<'_, O>, TrainError> {
        Ok(match self {
            Self::Plain { share, num_items, accumulation_steps } => Batches::Plain {
                batches: share.iter(),
                num_left: share.num_items(),
                accumulation_steps: *accumulation_steps,
                num_taken: 0,
                epoch_items: *num_items,
            },
            Self::Planned { loader, handle } => {
                let num_before = handle.num_epochs();
                // It starts the epoch whose windows the handle then has.
                let batches = loader.iter();
                if handle.num_epochs() == num_before {
                    return Err(other_loader());
                }
                let (handle, steps) = (handle.clone(), VecDeque::new());
                Batches::Planned { batches, handle, steps, num_before: 0, epoch_items: 0 }
            }
        })
    }

    pub(super) fn handle(&self) -> Option<&LoaderHandle> {
        match self {
            Self::Plain { .. } => None,
            Self::Planned { handle, .. } => Some(handle),
        }
    }
}

fn other_loader() -> TrainError {
    let problem = "the training was given another loader than the one whose plan it follows; give it the one that \
                   `with_train_loader` or `with_valid_loader` was given";
    TrainError::Setting { problem: problem.into() }
}

/// An epoch's batches of this rank.
pub(super) enum Batches<'a, O> {
    Plain {
        batches: PlainBatches<'a, O>,
        num_left: usize,
        accumulation_steps: usize,
        /// Batches of the window.
        num_taken: usize,
        epoch_items: usize,
    },
    Planned {
        batches: Box<dyn DataLoaderIterator<O> + 'a>,
        handle: LoaderHandle,
        /// What is left of the window.
        steps: VecDeque<MicroStep>,
        /// Items of the epoch that came before this run of it, over all ranks.
        num_before: usize,
        epoch_items: usize,
    },
}

/// A micro step of this rank.
pub(super) struct MicroBatch<O> {
    pub(super) batch: O,
    /// What its items weigh in the gradient, without padding.
    pub(super) weight: f64,
    /// Without padding.
    pub(super) num_items: usize,
    pub(super) num_padded: usize,
    /// The rank has no other one in this window.
    pub(super) is_last: bool,
    /// Every rank is known to have a batch in this micro step.
    pub(super) all_have_batches: bool,
}

impl<O> Batches<'_, O> {
    /// Goes on to the next window; not if it is known on all ranks that there is none.
    pub(super) fn open_window(&mut self) -> bool {
        match self {
            Self::Plain { num_taken, .. } => {
                *num_taken = 0;
                true
            }
            Self::Planned { handle, steps, num_before, epoch_items, .. } => {
                let Some(plan) = handle.next_window() else { return false };
                if plan.window == 0 {
                    (*num_before, *epoch_items) = (plan.first_item, plan.epoch_items);
                }
                *steps = plan.micro_steps.into();
                true
            }
        }
    }

    /// The next micro step of the window: a batch, or none where other ranks alone have one.
    pub(super) fn next_micro_step(&mut self) -> Result<Option<Option<MicroBatch<O>>>, TrainError> {
        match self {
            Self::Plain { batches, num_left, accumulation_steps, num_taken, .. } => {
                if num_taken == accumulation_steps {
                    return Ok(None);
                }
                let Some((batch, num_items)) = batches.next().transpose()? else {
                    *num_left = 0;
                    return Ok(None);
                };
                *num_left = num_left.saturating_sub(num_items);
                *num_taken += 1;
                let is_last = num_taken == accumulation_steps || *num_left == 0;
                let weight = num_items as f64;
                let all_have_batches = false;
                Ok(Some(Some(MicroBatch { batch, weight, num_items, num_padded: 0, is_last, all_have_batches })))
            }
            Self::Planned { batches, handle, steps, .. } => {
                let Some(plan) = steps.pop_front() else { return Ok(None) };
                if !plan.has_batch() {
                    return Ok(Some(None));
                }
                let (Some(batch), Some(weight)) = (batches.next(), handle.last_weight()) else {
                    return Err(other_loader());
                };
                let is_last = !steps.iter().any(MicroStep::has_batch);
                let MicroStep { num_items, num_padded, all_have_batches, .. } = plan;
                Ok(Some(Some(MicroBatch { batch, weight, num_items, num_padded, is_last, all_have_batches })))
            }
        }
    }

    /// Whether this rank has no more items, as far as it knows.
    pub(super) fn is_over(&self) -> bool {
        match self {
            Self::Plain { num_left, .. } => *num_left == 0,
            // The plan ends on all ranks alike.
            Self::Planned { .. } => false,
        }
    }

    /// Items of the epoch over all ranks: those before its first window here, and all.
    pub(super) fn epoch_items(&self) -> (usize, usize) {
        match self {
            Self::Plain { epoch_items, .. } => (0, *epoch_items),
            Self::Planned { num_before, epoch_items, .. } => (*num_before, *epoch_items),
        }
    }
}
