//! Which items ranks see: faults of other samplers, each with its right value, and what must always hold.

use bonfire::{
    placement::Shares,
    train::{Sampler, SamplerEpoch, SamplerOptions, Tail, TrainError, WindowPlan},
};
use proptest::prelude::*;

fn options(num_items: usize, batch_size: usize, world_size: usize) -> SamplerOptions {
    SamplerOptions {
        num_items,
        batch_size,
        accumulation_steps: 1,
        seed: 7,
        shuffle: false,
        tail: Tail::Keep,
        shares: Shares::Equal,
        rank: 0,
        world_size,
    }
}

/// Each rank's epoch, from an item of its order on.
fn epochs(options: &SamplerOptions, epoch: usize, first_item: usize) -> Vec<SamplerEpoch> {
    let of_rank = |rank| Sampler::new(SamplerOptions { rank, ..options.clone() })?.epoch(epoch, first_item);
    (0..options.world_size).map(|rank| of_rank(rank).unwrap()).collect()
}

/// The items of each micro step, those of the ranks one after the other.
fn global_batches(epochs: &[SamplerEpoch]) -> Vec<Vec<usize>> {
    let order = epochs[0].order();
    let items = |step| {
        let positions = epochs.iter().flat_map(move |epoch: &SamplerEpoch| epoch.positions(step));
        positions.map(|position| SamplerEpoch::dataset_index(&order, position)).collect()
    };
    (0..epochs[0].num_micro_steps()).map(items).collect()
}

/// Each rank's items of the first micro step.
fn first_batch(options: &SamplerOptions) -> Vec<usize> {
    epochs(options, 0, 0).iter().map(|epoch| epoch.micro_step(0).num_items).collect()
}

fn windows(epoch: &SamplerEpoch) -> Vec<WindowPlan> {
    (0..).map_while(|window| epoch.window(window)).collect()
}

/// CASES 1
#[test]
fn a_split_leaves_no_rank_empty_that_could_have_an_item() {
    assert_eq!(first_batch(&options(9, 9, 4)), [3, 2, 2, 2]);
    assert_eq!(first_batch(&options(36, 36, 7)), [6, 5, 5, 5, 5, 5, 5]);
    assert_eq!(first_batch(&options(10, 10, 4)), [3, 3, 2, 2]);
    assert_eq!(first_batch(&options(3, 3, 4)), [1, 1, 1, 0]);
    assert_eq!(global_batches(&epochs(&options(9, 9, 4), 0, 0)), [(0..9).collect::<Vec<_>>()]);
}

/// CASES 2
#[test]
fn the_first_ranks_share_is_the_one_given() {
    let first = |items, ranks, first| SamplerOptions { shares: Shares::First(first), ..options(items, items, ranks) };
    assert_eq!(first_batch(&first(32, 4, 5)), [5, 9, 9, 9]);
    assert_eq!(first_batch(&first(30, 4, 4)), [4, 9, 9, 8]);
    assert_eq!(first_batch(&first(10, 4, 0)), [0, 4, 3, 3]);
    assert_eq!(first_batch(&first(7, 4, 4)), [4, 1, 1, 1]);
}

/// CASES 5
#[test]
fn the_tail_of_an_accumulation_is_a_short_window() {
    let epoch = &epochs(&SamplerOptions { accumulation_steps: 4, ..options(20, 2, 2) }, 0, 0)[1];
    let windows = windows(epoch);
    assert_eq!(windows.iter().map(|window| window.micro_steps.len()).collect::<Vec<_>>(), [4, 4, 2]);
    assert_eq!(windows.iter().map(|window| window.num_items).collect::<Vec<_>>(), [8, 8, 4]);
    assert_eq!(windows.iter().map(|window| window.first_item).collect::<Vec<_>>(), [0, 8, 16]);
}

/// CASES 7
#[test]
fn unequal_counts_end_together_with_every_item_seen_once() {
    for epoch in 0..3 {
        let epochs = epochs(&SamplerOptions { shuffle: true, ..options(11, 5, 2) }, epoch, 0);
        assert!(epochs.iter().all(|epoch| windows(epoch).len() == 3));
        assert_eq!(epochs.iter().map(SamplerEpoch::num_rank_items).collect::<Vec<_>>(), [7, 4]);
        let mut seen = global_batches(&epochs).concat();
        seen.sort_unstable();
        assert_eq!(seen, (0..11).collect::<Vec<_>>());
    }
}

/// CASES 16
#[test]
fn each_epoch_has_its_own_order_and_its_own_members_of_a_shard() {
    let options = SamplerOptions { shuffle: true, ..options(40, 8, 2) };
    let of_rank_0 = |epoch| {
        let epoch = &epochs(&options, epoch, 0)[0];
        let order = epoch.order();
        let mut items: Vec<usize> = (0..5).flat_map(|step| epoch.positions(step)).map(|at| order[at]).collect();
        items.sort_unstable();
        items
    };
    assert_ne!(global_batches(&epochs(&options, 0, 0)), global_batches(&epochs(&options, 1, 0)));
    assert_ne!(of_rank_0(0), of_rank_0(1));
    assert_eq!(global_batches(&epochs(&options, 5, 0)), global_batches(&epochs(&options, 5, 0)));
    let other_seed = SamplerOptions { seed: 8, ..options.clone() };
    assert_ne!(global_batches(&epochs(&options, 0, 0)), global_batches(&epochs(&other_seed, 0, 0)));
}

/// CASES 17
#[test]
fn padded_duplicates_are_told_from_items() {
    let epochs = epochs(&SamplerOptions { tail: Tail::Pad, ..options(10, 3, 3) }, 0, 0);
    assert_eq!(global_batches(&epochs).last().unwrap(), &[9, 0, 1]);
    let last = epochs.iter().map(|epoch| epoch.micro_step(3));
    assert_eq!(last.map(|step| (step.num_items, step.num_padded)).collect::<Vec<_>>(), [(1, 0), (0, 1), (0, 1)]);
    let all = epochs.iter().flat_map(windows).flat_map(|window| window.micro_steps);
    assert_eq!(all.map(|step| step.num_items).sum::<usize>(), 10);
    assert!(epochs.iter().all(|epoch| windows(epoch).iter().map(|window| window.num_items).sum::<usize>() == 10));
}

#[test]
fn the_tail_is_dropped_only_when_asked() {
    let dropping = SamplerOptions { tail: Tail::DropLast, ..options(11, 5, 2) };
    assert_eq!(global_batches(&epochs(&dropping, 0, 0)), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]);
    assert_eq!(windows(&epochs(&dropping, 0, 0)[1])[0].epoch_items, 10);
}

/// CASES 19
#[test]
fn fewer_items_than_ranks_leave_ranks_empty_and_bad_arguments_are_named() {
    let epochs = epochs(&options(3, 8, 7), 0, 0);
    assert_eq!(epochs.iter().filter(|epoch| epoch.num_rank_items() == 0).count(), 4);
    assert!(epochs.iter().all(|epoch| windows(epoch).len() == 1));

    let error = |options| Sampler::new(options).map(|_| ()).unwrap_err();
    for (named, options) in [
        ("rank", SamplerOptions { rank: 2, ..options(3, 1, 2) }),
        ("world_size", options(3, 1, 0)),
        ("batch_size", options(3, 0, 2)),
        ("accumulation_steps", SamplerOptions { accumulation_steps: 0, ..options(3, 1, 2) }),
    ] {
        assert!(matches!(error(options), TrainError::Argument { argument, .. } if argument == named), "{named}");
    }
    for weights in [vec![1], vec![0, 0]] {
        let options = SamplerOptions { shares: Shares::Weighted(weights), ..options(3, 1, 2) };
        assert!(matches!(error(options), TrainError::Shares(_)));
    }
}

/// CASES 46
#[test]
fn one_item_of_two_ranks_is_one_update() {
    for epoch in epochs(&options(1, 2, 2), 0, 0) {
        let windows = windows(&epoch);
        assert_eq!(windows.len(), 1);
        assert_eq!(windows[0].num_items, 1);
    }
}

/// CASES 29, first half
#[test]
fn another_number_of_ranks_goes_on_with_the_same_global_batches() {
    let of = |world_size| SamplerOptions { shuffle: true, ..options(12, 4, world_size) };
    let straight = global_batches(&epochs(&of(2), 0, 0));
    let next = epochs(&of(2), 0, 0)[0].window(1).unwrap().first_item;
    for world_size in [4, 1] {
        assert_eq!(global_batches(&epochs(&of(world_size), 0, next)), straight[1..]);
    }
}

/// Pinned, so that no release changes the order of a run that is resumed.
#[test]
fn the_order_of_a_seed_and_an_epoch_stays() {
    let order = |epoch| epochs(&SamplerOptions { shuffle: true, ..options(10, 5, 1) }, epoch, 0)[0].order();
    assert_eq!(order(0), PINNED[0]);
    assert_eq!(order(1), PINNED[1]);
}

const PINNED: [[usize; 10]; 2] = [[2, 0, 5, 7, 3, 9, 8, 1, 4, 6], [7, 8, 1, 9, 5, 0, 2, 4, 6, 3]];

fn any_options() -> impl Strategy<Value = SamplerOptions> {
    let shares = prop_oneof![Just(None), proptest::collection::vec(0_u32..9, 6).prop_map(Some),];
    let tail = prop_oneof![Just(Tail::Keep), Just(Tail::DropLast), Just(Tail::Pad)];
    (0_usize..60, 1_usize..12, 1_usize..5, any::<u64>(), any::<bool>(), tail, shares, 1_usize..7).prop_map(
        |(num_items, batch_size, accumulation_steps, seed, shuffle, tail, weights, world_size)| {
            let weights = weights.map(|mut weights| {
                weights.truncate(world_size);
                weights[0] += 1;
                Shares::Weighted(weights)
            });
            let shares = weights.unwrap_or_default();
            let of = options(num_items, batch_size, world_size);
            SamplerOptions { accumulation_steps, seed, shuffle, tail, shares, ..of }
        },
    )
}

proptest! {
    #[test]
    fn ranks_together_see_what_one_device_sees(options in any_options(), epoch in 0_usize..5) {
        let epochs = epochs(&options, epoch, 0);
        let alone = SamplerOptions { world_size: 1, shares: Shares::Equal, ..options.clone() };
        let batches = global_batches(&epochs);
        prop_assert_eq!(&batches, &global_batches(&self::epochs(&alone, epoch, 0)));

        let mut seen = batches.concat();
        match options.tail {
            Tail::Keep => {
                seen.sort_unstable();
                prop_assert_eq!(seen, (0..options.num_items).collect::<Vec<_>>());
            }
            Tail::DropLast => prop_assert_eq!(seen.len(), options.num_items / options.batch_size * options.batch_size),
            Tail::Pad => prop_assert_eq!(seen.len(), options.num_items.next_multiple_of(options.batch_size)),
        }
    }

    #[test]
    fn plans_agree_over_ranks_and_with_the_items(options in any_options()) {
        let epochs = epochs(&options, 0, 0);
        let plans: Vec<Vec<WindowPlan>> = epochs.iter().map(windows).collect();
        let mut num_items = 0;
        for window in 0..plans[0].len() {
            for (step, micro_step) in plans[0][window].micro_steps.iter().enumerate() {
                let at = window * options.accumulation_steps + step;
                let of_ranks = plans.iter().map(|plans| plans[window].micro_steps[step]);
                prop_assert_eq!(of_ranks.clone().map(|step| step.num_items).sum::<usize>(), micro_step.global_items);
                prop_assert!(of_ranks.clone().all(|step| step.global_items == micro_step.global_items));
                for (step, epoch) in of_ranks.zip(&epochs) {
                    prop_assert_eq!(step.num_items + step.num_padded, epoch.positions(at).len());
                }
                num_items += micro_step.global_items;
            }
        }
        prop_assert_eq!(num_items, Sampler::new(options).unwrap().epoch_items());
    }

    #[test]
    fn resuming_at_any_window_is_the_straight_run(options in any_options(), world_size in 1_usize..7, at in 0_usize..9) {
        let straight = epochs(&options, 3, 0);
        let Some(next) = straight[0].window(at) else { return Ok(()) };
        let resumed = SamplerOptions { world_size, shares: Shares::Equal, ..options.clone() };
        let rest = global_batches(&straight).split_off(at * options.accumulation_steps);
        prop_assert_eq!(global_batches(&epochs(&resumed, 3, next.first_item)), rest);
    }
}
