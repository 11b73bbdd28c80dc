//! What a loader and the one who trains with it both know: where the run is in its data.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bonfire_collectives::{Buffer, BufferMut, Communicator};
use bonfire_placement::{Shares, StepCost, balance};

use super::sampler::{Sampler, SamplerEpoch, SamplerState, WindowPlan};
use crate::TrainError;

/// The plan of a [`DistributedDataLoader`](crate::DistributedDataLoader)'s batches, for the one who trains with them.
///
/// Clones share one walk. Each `iter()` of the loader starts the next epoch; the windows that
/// [`next_window`](Self::next_window) then gives one after the other are those of the iterator's batches.
#[derive(Clone, Debug)]
pub struct LoaderHandle {
    walk: Arc<Mutex<Walk>>,
}

#[derive(Debug)]
struct Walk {
    sampler: Sampler,
    /// What the next `iter()` starts: an epoch, from an item of its order on.
    next_epoch: usize,
    next_item: usize,
    /// The epoch under way and its next window.
    current: Option<(SamplerEpoch, usize)>,
    last_weight: Option<f64>,
    /// Epochs that were started.
    num_epochs: usize,
    /// Items and seconds of this rank since the shares were last agreed on.
    measured: (f64, f64),
}

impl LoaderHandle {
    /// A walk that has not begun.
    pub(crate) fn new(sampler: Sampler) -> Self {
        let walk = Walk {
            sampler,
            next_epoch: 0,
            next_item: 0,
            current: None,
            last_weight: None,
            num_epochs: 0,
            measured: (0.0, 0.0),
        };
        Self { walk: Arc::new(Mutex::new(walk)) }
    }

    /// The next optimizer step of the epoch under way; `None` when it is over, or before the first one.
    pub fn next_window(&self) -> Option<WindowPlan> {
        let mut walk = self.lock();
        let (epoch, window) = walk.current.as_mut()?;
        let plan = epoch.window(*window)?;
        *window += 1;
        Some(plan)
    }

    /// The weight of the batch that the iterator gave last: its items without padding, or what
    /// [`with_counts`](crate::DistributedDataLoaderBuilder::with_counts) says. `None` before the first one of an epoch.
    pub fn last_weight(&self) -> Option<f64> {
        self.lock().last_weight
    }

    /// Where the run is after all windows that were given so far.
    pub fn state(&self) -> SamplerState {
        let walk = self.lock();
        let options = walk.sampler.options();
        let (epoch, next_item) = match &walk.current {
            None => (walk.next_epoch, walk.next_item),
            Some((current, window)) => match current.window(*window) {
                Some(next) => (current.epoch(), next.first_item),
                None => (current.epoch() + 1, 0),
            },
        };
        SamplerState { seed: options.seed, epoch, next_item, num_items: options.num_items }
    }

    /// Lets the next `iter()` of the loader go on where `state` was taken, whatever the number of ranks was then.
    ///
    /// # Errors
    ///
    /// [`TrainError::Resume`] if the dataset does not have as many items.
    pub fn resume(&self, state: SamplerState) -> Result<(), TrainError> {
        let mut walk = self.lock();
        let mut options = walk.sampler.options().clone();
        if state.num_items != options.num_items || state.next_item > state.num_items {
            let reason = format!(
                "the state is at item {} of a dataset of {} items, this one has {}; give the dataset it was saved with",
                state.next_item, state.num_items, options.num_items
            );
            return Err(TrainError::Resume { reason });
        }
        options.seed = state.seed;
        walk.sampler = Sampler::new(options)?;
        (walk.next_epoch, walk.next_item) = (state.epoch, state.next_item);
        walk.current = None;
        Ok(())
    }

    /// Notes that this rank took so many seconds of its own work, without waiting for others, for so many items.
    pub fn report_speed(&self, num_items: usize, seconds: f64) {
        if seconds.is_finite() && seconds > 0.0 {
            let mut walk = self.lock();
            walk.measured.0 += num_items as f64;
            walk.measured.1 += seconds;
        }
    }

    /// Lets all ranks agree on shares with which they end a step together, by what they reported; all must call it.
    ///
    /// They hold from the next epoch on, because batches of this one may be built already. Whether they changed:
    /// not where less than [`MIN_GAIN`](bonfire_placement::MIN_GAIN) of a step's time would be saved, nor while a rank has
    /// reported nothing.
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_gather`]; [`TrainError::Argument`] for a communicator of another number of ranks.
    pub fn agree_shares(&self, communicator: &dyn Communicator) -> Result<bool, TrainError> {
        let (own, sampler) = {
            let walk = self.lock();
            let (items, seconds) = walk.measured;
            (if items > 0.0 { seconds / items } else { 0.0 }, walk.sampler.clone())
        };
        let options = sampler.options();
        let world_size = communicator.world_size();
        if world_size != options.world_size {
            let hint = format!("the loader was made for {} ranks", options.world_size);
            return Err(TrainError::Argument { argument: "world_size", given: world_size.to_string(), hint });
        }
        // As bits, for all ranks must decide from the very same numbers.
        let own = [own.to_bits() as i64];
        let mut all = vec![0_i64; world_size];
        communicator.all_gather(Buffer::from_slice(&own), &vec![1; world_size], BufferMut::from_slice(&mut all))?;
        let batch_size = options.batch_size;
        let cost = |&bits: &i64| StepCost {
            all_rows_seconds: f64::from_bits(bits as u64) * batch_size as f64,
            fixed_seconds: 0.0,
        };
        let costs: Vec<StepCost> = all.iter().map(cost).collect();
        let present = options.shares.lengths(batch_size, world_size).map_err(TrainError::Shares)?;
        let present: Vec<u32> = present.iter().map(|rows| u32::try_from(rows).unwrap_or(u32::MAX)).collect();
        let Some(weights) = balance(&costs, &present, batch_size) else { return Ok(false) };
        let sampler = sampler.with_shares(Shares::Weighted(weights))?;
        let mut walk = self.lock();
        walk.sampler = sampler;
        walk.measured = (0.0, 0.0);
        Ok(true)
    }

    /// How batches are shared out from the next epoch on.
    pub fn shares(&self) -> Shares {
        self.lock().sampler.options().shares.clone()
    }

    /// Starts the next epoch.
    pub(crate) fn start_epoch(&self) -> Result<SamplerEpoch, TrainError> {
        let mut walk = self.lock();
        let epoch = walk.sampler.epoch(walk.next_epoch, walk.next_item)?;
        (walk.next_epoch, walk.next_item) = (walk.next_epoch + 1, 0);
        walk.last_weight = None;
        walk.num_epochs += 1;
        walk.current = Some((epoch.clone(), 0));
        Ok(epoch)
    }

    /// Epochs that its loaders have started.
    pub(crate) fn num_epochs(&self) -> usize {
        self.lock().num_epochs
    }

    pub(crate) fn sampler(&self) -> Sampler {
        self.lock().sampler.clone()
    }

    pub(crate) fn set_last_weight(&self, weight: f64) {
        self.lock().last_weight = Some(weight);
    }

    fn lock(&self) -> MutexGuard<'_, Walk> {
        // Each change is whole before anything can panic.
        self.walk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
