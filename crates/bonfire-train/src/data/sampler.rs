//! The order of an epoch and each rank's part of it: pure, the same on every rank and every platform.

use std::ops::Range;

use bonfire_placement::{Lengths, Shares};
use serde::{Deserialize, Serialize};

use crate::TrainError;

/// What happens to the items at the end of an epoch that do not fill a global micro batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tail {
    /// They are a smaller micro batch: each item is seen once, and some ranks may have fewer items than others, or none.
    #[default]
    Keep,
    /// They are left out.
    DropLast,
    /// Items from the start of the epoch fill them up to a whole micro batch, behind the real ones, so that a rank's
    /// micro batches all have the same size. The loss of such a batch counts the repeated items too.
    Pad,
}

/// What decides which items a rank sees.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// Items of the dataset.
    pub num_items: usize,
    /// Items of one micro step, over all ranks.
    pub batch_size: usize,
    /// Micro steps of one optimizer step.
    pub accumulation_steps: usize,
    /// Where the random orders come from; the same on every rank.
    pub seed: u64,
    /// Whether each epoch has an order of its own; otherwise all have the dataset's.
    pub shuffle: bool,
    /// What happens to an incomplete micro batch.
    pub tail: Tail,
    /// How a micro batch is shared out.
    pub shares: Shares,
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
}

/// Where a run is in its data; with it another run goes on from there, with any number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// Where the random orders come from.
    pub seed: u64,
    /// The epoch, counted from 0.
    pub epoch: usize,
    /// How many items of the epoch's order are done with, over all ranks.
    pub next_item: usize,
    /// Items of the dataset.
    pub num_items: usize,
}

/// What this rank does in one micro step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroStep {
    /// Items of this rank, without padding; 0 is possible.
    pub num_items: usize,
    /// Repeated items that follow them, see [`Tail::Pad`].
    pub num_padded: usize,
    /// Items of all ranks, without padding.
    pub global_items: usize,
    /// Whether every rank has a batch for it, if only of padding.
    pub all_have_batches: bool,
}

impl MicroStep {
    /// Whether the loader gives this rank a batch for it.
    pub fn has_batch(&self) -> bool {
        self.num_items + self.num_padded > 0
    }
}

/// What this rank does in one optimizer step.
///
/// On all ranks everything is the same but the items of each micro step that are this rank's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowPlan {
    /// The epoch, counted from 0.
    pub epoch: usize,
    /// The optimizer step, counted from 0 where the walk through the epoch began.
    pub window: usize,
    /// Where in the epoch's order its items begin.
    pub first_item: usize,
    /// The micro steps, of the same number on all ranks.
    pub micro_steps: Vec<MicroStep>,
    /// Items of all ranks and micro steps, without padding.
    pub num_items: usize,
    /// Items of all ranks in the whole epoch, without padding.
    pub epoch_items: usize,
}

/// Says for each epoch which items a rank sees, and when.
///
/// An epoch's order is cut into global micro batches of `batch_size` items, each one contiguous; a micro batch is shared
/// out contiguously in rank order, so that the ranks' items one after the other are the batch that one device would see.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplerOptions,
    /// Each rank's items of a whole micro batch.
    whole: Lengths,
}

impl Sampler {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// [`TrainError::Argument`] and [`TrainError::Shares`] name the option that cannot be.
    pub fn new(options: SamplerOptions) -> Result<Self, TrainError> {
        let &SamplerOptions { batch_size, accumulation_steps, rank, world_size, .. } = &options;
        let positive =
            [("world_size", world_size), ("batch_size", batch_size), ("accumulation_steps", accumulation_steps)];
        if let Some((argument, _)) = positive.into_iter().find(|&(_, value)| value == 0) {
            return Err(TrainError::Argument { argument, given: "0".into(), hint: "give at least 1".into() });
        }
        if rank >= world_size {
            let hint = format!("ranks of world_size {world_size} are 0 to {}", world_size - 1);
            return Err(TrainError::Argument { argument: "rank", given: rank.to_string(), hint });
        }
        let whole = options.shares.lengths(batch_size, world_size).map_err(TrainError::Shares)?;
        Ok(Self { options, whole })
    }

    /// What it was made with.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// The same with other shares.
    ///
    /// # Errors
    ///
    /// [`TrainError::Shares`].
    pub fn with_shares(&self, shares: Shares) -> Result<Self, TrainError> {
        Self::new(SamplerOptions { shares, ..self.options.clone() })
    }

    /// Items of an epoch over all ranks, without padding.
    pub fn epoch_items(&self) -> usize {
        let SamplerOptions { num_items, batch_size, tail, .. } = self.options;
        match tail {
            Tail::Keep | Tail::Pad => num_items,
            Tail::DropLast => num_items - num_items % batch_size,
        }
    }

    /// An epoch from the item `first_item` of its order on.
    ///
    /// # Errors
    ///
    /// [`TrainError::Shares`] where the last, smaller micro batch cannot be shared out.
    pub fn epoch(&self, epoch: usize, first_item: usize) -> Result<SamplerEpoch, TrainError> {
        let SamplerOptions { batch_size, tail, ref shares, world_size, .. } = self.options;
        let left = self.epoch_items().saturating_sub(first_item);
        let (num_whole, num_last) = match tail {
            Tail::Keep => (left / batch_size, left % batch_size),
            // Fewer than a batch are left over only after a start in the middle of one.
            Tail::DropLast => (left / batch_size, 0),
            Tail::Pad => (left.div_ceil(batch_size), 0),
        };
        let last = shares.lengths(num_last, world_size).map_err(TrainError::Shares)?;
        Ok(SamplerEpoch { sampler: self.clone(), epoch, first_item, left, num_whole, last })
    }
}

/// One epoch as a rank walks through it.
#[derive(Clone, Debug)]
pub struct SamplerEpoch {
    sampler: Sampler,
    epoch: usize,
    first_item: usize,
    /// Items from the first one on, without padding.
    left: usize,
    num_whole: usize,
    last: Lengths,
}

impl SamplerEpoch {
    /// The epoch, counted from 0.
    pub fn epoch(&self) -> usize {
        self.epoch
    }

    /// How many micro steps every rank takes.
    pub fn num_micro_steps(&self) -> usize {
        self.num_whole + usize::from(self.last.total() > 0)
    }

    /// How many optimizer steps every rank takes.
    pub fn num_windows(&self) -> usize {
        self.num_micro_steps().div_ceil(self.sampler.options.accumulation_steps)
    }

    /// Items of this rank, with padding.
    pub fn num_rank_items(&self) -> usize {
        let rank = self.sampler.options.rank;
        self.num_whole * self.sampler.whole.of(rank) + self.last.of(rank)
    }

    /// The window of this index; `None` behind the last one.
    pub fn window(&self, window: usize) -> Option<WindowPlan> {
        let SamplerOptions { batch_size, accumulation_steps, .. } = self.sampler.options;
        if window >= self.num_windows() {
            return None;
        }
        let first = window * accumulation_steps;
        let steps = first..(first + accumulation_steps).min(self.num_micro_steps());
        let micro_steps: Vec<MicroStep> = steps.map(|step| self.micro_step(step)).collect();
        Some(WindowPlan {
            epoch: self.epoch,
            window,
            first_item: self.first_item + first * batch_size,
            num_items: micro_steps.iter().map(|step| step.global_items).sum(),
            micro_steps,
            epoch_items: self.sampler.epoch_items(),
        })
    }

    /// What this rank does in the micro step of this index.
    pub fn micro_step(&self, step: usize) -> MicroStep {
        let real = self.left.saturating_sub(step * self.sampler.options.batch_size);
        let global_items = real.min(self.lengths(step).total());
        let lengths = self.lengths(step);
        let own = lengths.range(self.sampler.options.rank);
        let num_items = own.end.min(global_items).saturating_sub(own.start);
        let all_have_batches = (0..self.sampler.options.world_size).all(|rank| lengths.of(rank) > 0);
        MicroStep { num_items, num_padded: own.len() - num_items, global_items, all_have_batches }
    }

    /// Where in the epoch's order this rank's items of a micro step are; padding lies behind the order's end, which
    /// [`dataset_index`](Self::dataset_index) knows.
    pub fn positions(&self, step: usize) -> Range<usize> {
        let start = self.first_item + step * self.sampler.options.batch_size;
        let own = self.lengths(step).range(self.sampler.options.rank);
        start + own.start..start + own.end
    }

    /// The item of the dataset at a position of `order`, which starts over behind its end.
    pub fn dataset_index(order: &[usize], position: usize) -> usize {
        order[position % order.len()]
    }

    /// The indices of the dataset's items in the order of this epoch.
    pub fn order(&self) -> Vec<usize> {
        let SamplerOptions { num_items, seed, shuffle, .. } = self.sampler.options;
        let mut order: Vec<usize> = (0..num_items).collect();
        if shuffle {
            let mut random = SplitMix::new(seed, self.epoch as u64);
            // Fisher and Yates, from the back.
            for last in (1..num_items).rev() {
                order.swap(last, random.below(last as u64 + 1) as usize);
            }
        }
        order
    }

    fn lengths(&self, step: usize) -> &Lengths {
        if step < self.num_whole { &self.sampler.whole } else { &self.last }
    }
}

/// Random numbers that no platform and no release of a crate changes.
///
/// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (`SplitMix64`).
struct SplitMix {
    state: u64,
}

impl SplitMix {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    fn new(seed: u64, epoch: u64) -> Self {
        // The epoch goes through the mixer, so that epochs of neighbouring seeds are not each other's.
        let mut of_seed = SplitMix { state: seed };
        let mixed = of_seed.next();
        let mut of_epoch = SplitMix { state: mixed ^ epoch.wrapping_mul(Self::STEP) };
        SplitMix { state: of_epoch.next() }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(Self::STEP);
        let mut bits = self.state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `bound`, each as likely as the others.
    fn below(&mut self, bound: u64) -> u64 {
        // What a whole number of rounds of `bound` leaves at the top would make low numbers likelier.
        let usable = u64::MAX - u64::MAX % bound;
        loop {
            let drawn = self.next();
            if drawn < usable {
                return drawn % bound;
            }
        }
    }
}
