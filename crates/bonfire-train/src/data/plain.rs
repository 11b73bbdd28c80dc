//! A rank's part of a loader of Burn's own, of which only slices and progress can be had.

use std::sync::Arc;

use bonfire_placement::{Lengths, Shares};
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::tensor::backend::Backend;

use super::sampler::SamplerState;
use crate::TrainError;

/// This rank's contiguous part of a plain loader's items, for training.
///
/// The parts are equal, what is left over goes to the lower ranks. They are cut before the loader shuffles, so an item
/// stays with its rank; batches are of the loader's own size on every rank, so that the global batch is as many times that.
/// Ranks may have different numbers of batches. A [`DistributedDataLoader`](crate::DistributedDataLoader) has neither
/// limit.
pub struct PlainShare<B: Backend, O> {
    loader: Arc<dyn DataLoader<B, O>>,
    num_items: usize,
}

impl<B: Backend, O: 'static> PlainShare<B, O> {
    /// Cuts out the part of `rank`.
    ///
    /// # Errors
    ///
    /// [`TrainError::Argument`] if `world_size` is 0 or `rank` not below it.
    pub fn new(loader: &Arc<dyn DataLoader<B, O>>, rank: usize, world_size: usize) -> Result<Self, TrainError> {
        let num_items = loader.num_items();
        let own = shares(num_items, rank, world_size)?.range(rank);
        Ok(Self { num_items: own.len(), loader: slice(loader, own.start, own.end) })
    }

    /// Items of this rank in an epoch.
    pub fn num_items(&self) -> usize {
        self.num_items
    }

    /// The next epoch's batches of this rank.
    pub fn iter(&self) -> PlainBatches<'_, O> {
        PlainBatches { batches: self.loader.iter(), num_seen: 0 }
    }

    /// Checks that a run is not to go on inside an epoch: a plain loader starts each one at its first item.
    ///
    /// # Errors
    ///
    /// [`TrainError::PlainLoader`] if `state` is not at the start of an epoch.
    pub fn check_resume(state: &SamplerState) -> Result<(), TrainError> {
        if state.next_item == 0 {
            return Ok(());
        }
        Err(TrainError::PlainLoader { asked: format!("a start at item {} of an epoch", state.next_item) })
    }

    /// Checks that the parts are to be equal, as they are.
    ///
    /// # Errors
    ///
    /// [`TrainError::PlainLoader`] for all other shares.
    pub fn check_shares(shares: &Shares) -> Result<(), TrainError> {
        match shares {
            Shares::Equal => Ok(()),
            Shares::Weighted(_) | Shares::First(_) => {
                Err(TrainError::PlainLoader { asked: format!("the unequal shares {shares:?}") })
            }
        }
    }
}

/// An epoch of a [`PlainShare`]: each batch with its number of items, by the loader's progress.
pub struct PlainBatches<'a, O> {
    batches: Box<dyn DataLoaderIterator<O> + 'a>,
    num_seen: usize,
}

impl<O> PlainBatches<'_, O> {
    /// How far this rank is in its part.
    pub fn progress(&self) -> Progress {
        self.batches.progress()
    }
}

impl<O> Iterator for PlainBatches<'_, O> {
    /// An error is a [`TrainError::PlainLoader`]: the loader's progress does not count the batch's items.
    type Item = Result<(O, usize), TrainError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        let seen = self.batches.progress().items_processed;
        let num_items = seen.saturating_sub(self.num_seen);
        self.num_seen = seen;
        if num_items == 0 {
            let asked = "the counting of a batch's items: its progress did not move on".into();
            return Some(Err(TrainError::PlainLoader { asked }));
        }
        Some(Ok((batch, num_items)))
    }
}

/// This rank's part of a plain loader for validation, cut between its batches of `batch_size` items, so that the ranks'
/// batches one after the other are those of one device.
///
/// The batches are shared out equally, what is left over goes to the lower ranks. A loader that shuffles keeps its items,
/// not its batches.
///
/// # Errors
///
/// [`TrainError::Argument`] if `batch_size` or `world_size` is 0 or `rank` not below `world_size`.
pub fn batch_aligned_slice<B: Backend, O: 'static>(
    loader: &Arc<dyn DataLoader<B, O>>,
    batch_size: usize,
    rank: usize,
    world_size: usize,
) -> Result<Arc<dyn DataLoader<B, O>>, TrainError> {
    if batch_size == 0 {
        let hint = "give the size of the loader's batches".into();
        return Err(TrainError::Argument { argument: "batch_size", given: "0".into(), hint });
    }
    let num_items = loader.num_items();
    let batches = shares(num_items.div_ceil(batch_size), rank, world_size)?.range(rank);
    let item = |batch: usize| (batch * batch_size).min(num_items);
    Ok(slice(loader, item(batches.start), item(batches.end)))
}

fn shares(total: usize, rank: usize, world_size: usize) -> Result<Lengths, TrainError> {
    if world_size == 0 {
        return Err(TrainError::Argument { argument: "world_size", given: "0".into(), hint: "give at least 1".into() });
    }
    if rank >= world_size {
        let hint = format!("ranks of world_size {world_size} are 0 to {}", world_size - 1);
        return Err(TrainError::Argument { argument: "rank", given: rank.to_string(), hint });
    }
    Shares::Equal.lengths(total, world_size).map_err(TrainError::Shares)
}

fn slice<B: Backend, O: 'static>(
    loader: &Arc<dyn DataLoader<B, O>>,
    start: usize,
    end: usize,
) -> Arc<dyn DataLoader<B, O>> {
    match start..end {
        // Loaders of several threads start them for nothing, and not all take an empty range.
        empty if empty.is_empty() => Arc::new(Empty),
        whole if whole == (0..loader.num_items()) => loader.clone(),
        _ => loader.slice(start, end),
    }
}

/// A loader of nothing.
struct Empty;

impl<B: Backend, O: 'static> DataLoader<B, O> for Empty {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(Nothing(std::iter::empty()))
    }

    fn num_items(&self) -> usize {
        0
    }

    fn to_device(&self, _device: &B::Device) -> Arc<dyn DataLoader<B, O>> {
        Arc::new(Empty)
    }

    fn slice(&self, _start: usize, _end: usize) -> Arc<dyn DataLoader<B, O>> {
        Arc::new(Empty)
    }
}

struct Nothing<O>(std::iter::Empty<O>);

impl<O> Iterator for Nothing<O> {
    type Item = O;

    fn next(&mut self) -> Option<O> {
        self.0.next()
    }
}

impl<O> DataLoaderIterator<O> for Nothing<O> {
    fn progress(&self) -> Progress {
        Progress { items_processed: 0, items_total: 0 }
    }
}
