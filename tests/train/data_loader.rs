//! Loaders of ranks: their batches, epochs, threads, and plans.

use std::{num::NonZeroUsize, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use bonfire::{
    collectives::{Communicator, run_ranks},
    placement::Shares,
    train::{
        DistributedDataLoader, DistributedDataLoaderBuilder, PlainShare, SamplerState, Tail, TrainError,
        batch_aligned_slice,
    },
};
use burn::data::{
    dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
    dataset::{Dataset, InMemDataset},
};
use burn_flex::{Flex, FlexDevice};

/// A batch is its items.
#[derive(Clone)]
struct Items;

impl Batcher<Flex, usize, Vec<usize>> for Items {
    fn batch(&self, items: Vec<usize>, _device: &FlexDevice) -> Vec<usize> {
        items
    }
}

type Builder = DistributedDataLoaderBuilder<Flex, usize, Vec<usize>>;
type Loader = DistributedDataLoader<Flex, usize, Vec<usize>>;

fn dataset(num_items: usize) -> InMemDataset<usize> {
    InMemDataset::new((0..num_items).collect())
}

fn builder(batch_size: usize) -> Builder {
    Builder::new(Items).batch_size(batch_size)
}

fn batches(loader: &dyn DataLoader<Flex, Vec<usize>>) -> Vec<Vec<usize>> {
    loader.iter().collect()
}

/// What the ranks see together in one epoch, by micro step, as their plans say.
fn together(loaders: &[Loader]) -> Vec<Vec<usize>> {
    let mut global: Vec<Vec<usize>> = Vec::new();
    for loader in loaders {
        let mut iterator = loader.iter();
        let handle = loader.handle();
        let plans = std::iter::from_fn(|| handle.next_window());
        for (step, plan) in plans.flat_map(|plan| plan.micro_steps).enumerate() {
            global.resize_with(global.len().max(step + 1), Vec::new);
            if plan.has_batch() {
                let batch = iterator.next().unwrap();
                assert_eq!(batch.len(), plan.num_items + plan.num_padded);
                assert_eq!(handle.last_weight(), Some(plan.num_items as f64));
                global[step].extend(batch);
            }
        }
        assert_eq!(iterator.next(), None);
        let progress = iterator.progress();
        assert_eq!((progress.items_processed, progress.items_total), (loader.num_items(), loader.num_items()));
    }
    global
}

fn ranks(world_size: usize, builder: impl Fn() -> Builder, num_items: usize) -> Vec<Loader> {
    (0..world_size).map(|rank| builder().rank(rank, world_size).build(dataset(num_items)).unwrap()).collect()
}

/// CASES 16
#[test]
fn every_iter_is_the_next_epoch_with_no_call_by_the_user() {
    let loaders = ranks(2, || builder(8).shuffle(3), 40);
    let shards = [batches(&loaders[0]), batches(&loaders[0])].map(|epoch| {
        let mut items = epoch.concat();
        items.sort_unstable();
        items
    });
    assert_ne!(shards[0], shards[1]);

    // At epoch 5 the order is epoch 5's.
    let straight = &ranks(1, || builder(8).shuffle(3), 40)[0];
    let epochs: Vec<_> = (0..6).map(|_| batches(straight)).collect();
    let resumed = &ranks(1, || builder(8).shuffle(9), 40)[0];
    resumed.handle().resume(SamplerState { seed: 3, epoch: 5, next_item: 0, num_items: 40 }).unwrap();
    assert_eq!(batches(resumed), epochs[5]);
}

#[test]
fn ranks_and_workers_change_no_global_batch() {
    for tail in [Tail::Keep, Tail::DropLast, Tail::Pad] {
        let of = || builder(7).accumulation_steps(2).shuffle(1).tail(tail);
        let alone = &ranks(1, of, 45);
        let straight = [together(alone), together(alone)];
        for (world_size, num_workers) in [(1, 1), (2, 0), (3, 2), (4, 5)] {
            let loaders = ranks(world_size, || of().num_workers(num_workers), 45);
            assert_eq!([together(&loaders), together(&loaders)], straight, "{tail:?} {world_size} {num_workers}");
        }
    }
}

/// CASES 7, 19, 46
#[test]
fn ranks_without_items_have_plans_of_the_same_length() {
    for (num_items, batch_size, world_size) in [(11, 5, 2), (3, 8, 7), (1, 2, 2), (0, 4, 2)] {
        let loaders = ranks(world_size, || builder(batch_size).num_workers(2), num_items);
        for _epoch in 0..3 {
            assert_eq!(together(&loaders).concat(), (0..num_items).collect::<Vec<_>>());
        }
    }
}

/// CASES 29, first half
#[test]
fn a_run_resumed_with_other_ranks_sees_the_other_items_once_each() {
    let of = || builder(4).shuffle(5);
    let straight = together(&ranks(2, of, 12));
    let stopped = ranks(2, of, 12);
    let iterator = stopped[0].iter();
    stopped[0].handle().next_window().unwrap();
    let state = stopped[0].handle().state();
    drop(iterator);
    let state: SamplerState = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
    assert_eq!(state, SamplerState { seed: 5, epoch: 0, next_item: 4, num_items: 12 });
    for world_size in [4, 1] {
        let resumed = ranks(world_size, of, 12);
        for loader in &resumed {
            loader.handle().resume(state).unwrap();
        }
        assert_eq!(together(&resumed), straight[1..]);
        assert_eq!(resumed[0].handle().state().epoch, 1);
    }
    let error = ranks(1, of, 13)[0].handle().resume(state).unwrap_err();
    assert!(error.to_string().contains("12 items, this one has 13"), "{error}");
}

/// One that knows no item 6.
struct Faulty;

impl Dataset<usize> for Faulty {
    fn get(&self, index: usize) -> Option<usize> {
        assert_ne!(index, 6, "item 6 is unreadable");
        Some(index)
    }

    fn len(&self) -> usize {
        20
    }
}

#[test]
fn a_panic_of_the_dataset_reaches_the_one_who_iterates() {
    for num_workers in [0, 1, 3] {
        let loader = builder(2).num_workers(num_workers).build(Faulty).unwrap();
        let mut iterator = loader.iter();
        assert_eq!(iterator.by_ref().take(3).collect::<Vec<_>>().concat(), [0, 1, 2, 3, 4, 5]);
        let panic = std::panic::catch_unwind(AssertUnwindSafe(|| iterator.next())).unwrap_err();
        assert!(panic.downcast_ref::<String>().unwrap().contains("item 6 is unreadable"));
    }
}

#[test]
fn an_iterator_dropped_early_leaves_no_thread() {
    let shared = Arc::new(dataset(1000));
    let loader = builder(1).num_workers(3).build(shared.clone()).unwrap();
    let mut iterator = loader.iter();
    iterator.next();
    drop(iterator);
    drop(loader);
    assert_eq!(Arc::strong_count(&shared), 1);
}

#[test]
fn counts_other_than_items_come_with_the_batch() {
    for num_workers in [0, 2] {
        let loader = builder(2).num_workers(num_workers).with_counts(|&item| item as f64).build(dataset(5)).unwrap();
        let handle = loader.handle();
        assert_eq!(handle.last_weight(), None);
        let weights: Vec<_> = loader.iter().map(|_| handle.last_weight().unwrap()).collect();
        assert_eq!(weights, [1.0, 5.0, 4.0]);
    }
}

#[test]
fn other_devices_share_the_walk_and_slices_have_their_own() {
    let loader = builder(4).build(dataset(10)).unwrap();
    let moved = loader.to_device(&FlexDevice);
    let _iterator = moved.iter();
    assert!(loader.handle().next_window().is_some());
    assert_eq!(batches(&*loader.slice(3, 8)), [vec![3, 4, 5, 6], vec![7]]);
    assert_eq!(batches(&*loader.slice(8, 99)), [[8, 9]]);
    assert_eq!(batches(&*loader.slice(5, 5)), [[0; 0]; 0]);
}

#[test]
fn ranks_agree_on_shares_by_the_speed_that_they_measured() {
    let shares = run_ranks(NonZeroUsize::new(2).unwrap(), Duration::from_secs(10), |communicator| {
        let rank = communicator.rank();
        let loader = builder(96).rank(rank, 2).build(dataset(96)).unwrap();
        let handle = loader.handle();
        assert!(!handle.agree_shares(&communicator).unwrap());
        handle.report_speed(48, if rank == 0 { 2.0 } else { 1.0 });
        assert!(handle.agree_shares(&communicator).unwrap());
        assert_eq!(loader.num_items(), [32, 64][rank]);
        // The same speed changes nothing more.
        handle.report_speed(48, if rank == 0 { 2.0 } else { 1.0 });
        assert!(!handle.agree_shares(&communicator).unwrap());
        handle.shares()
    });
    assert!(shares.iter().all(|shares| *shares == Shares::Weighted(vec![32, 64])));
}

fn plain(num_items: usize, num_workers: usize) -> Arc<dyn DataLoader<Flex, Vec<usize>>> {
    DataLoaderBuilder::new(Items).batch_size(4).num_workers(num_workers).build(dataset(num_items))
}

#[test]
fn a_plain_loader_gives_contiguous_parts_with_their_counts() {
    for num_workers in [0, 2] {
        for (num_items, world_size) in [(11, 2), (3, 7), (1, 2), (0, 2), (16, 1)] {
            let loader = plain(num_items, num_workers);
            let mut seen = Vec::new();
            for rank in 0..world_size {
                let share = PlainShare::new(&loader, rank, world_size).unwrap();
                let before = seen.len();
                for batch in share.iter() {
                    let (batch, num_items) = batch.unwrap();
                    assert_eq!(batch.len(), num_items);
                    seen.extend(batch);
                }
                assert_eq!(seen.len() - before, share.num_items());
                // Threads of Burn's loader race.
                seen[before..].sort_unstable();
            }
            assert_eq!(seen, (0..num_items).collect::<Vec<_>>());
        }
    }
}

#[test]
fn validation_batches_of_ranks_are_those_of_one_device() {
    for (num_items, world_size) in [(23, 2), (23, 3), (5, 4), (8, 2)] {
        let loader = plain(num_items, 0);
        let of_rank = |rank| batches(&*batch_aligned_slice(&loader, 4, rank, world_size).unwrap());
        let of_ranks: Vec<_> = (0..world_size).flat_map(of_rank).collect();
        assert_eq!(of_ranks, batches(&*loader));
    }
}

#[test]
fn a_plain_loader_names_the_one_that_can_do_more() {
    type Share = PlainShare<Flex, Vec<usize>>;
    let state = SamplerState { seed: 0, epoch: 2, next_item: 4, num_items: 12 };
    for error in [Share::check_resume(&state), Share::check_shares(&Shares::Weighted(vec![1, 2]))] {
        assert!(error.unwrap_err().to_string().contains("build a `DistributedDataLoader` instead"));
    }
    Share::check_shares(&Shares::Equal).unwrap();
    Share::check_resume(&SamplerState { next_item: 0, ..state }).unwrap();
    for (rank, world_size, named) in [(2, 2, "rank"), (0, 0, "world_size")] {
        let error = Share::new(&plain(3, 0), rank, world_size).map(|_| ()).unwrap_err();
        assert!(matches!(error, TrainError::Argument { argument, .. } if argument == named));
    }
}
