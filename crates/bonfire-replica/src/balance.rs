//! Shares that change between steps: measured on the members, decided on the caller's thread, recorded, replayed.
//!
//! ```text
//! member: task -> Meter -> a Sample per step -----------------.
//! caller: gradients are summed, so a step ends -> Balancer: enough samples? -> placement::balance -> new shares
//! ```

use std::{
    borrow::Cow,
    cell::RefCell,
    ops::Range,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Instant,
};

use bonfire_collectives::CollectiveError;
use bonfire_placement::{MIN_GAIN, Placement, ShareChange, ShareSchedule, Shares, StepCost, balance, gain};

use crate::{
    Balance, Member, ReplicaOptions,
    group::{Group, MemberContext, Order, Task},
};

/// Steps whose median decides.
const WINDOW: usize = 8;
/// The first steps of a group, which make threads, buffers and optimizer state.
const WARM_UP: u64 = 2;
/// The first steps with new shares, whose buffers have other sizes.
const SETTLING: u64 = 1;

/// What a task's time on a member depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cost {
    /// No work to speak of.
    Unmeasured,
    /// On others, who are waited for: members in a collective, or whoever reads.
    Collective,
    /// On nothing: it is the same for any share.
    Whole,
    /// On the member's rows.
    Rows { held: usize, of: usize },
}

impl Cost {
    /// Of work on values in `placements`: the first that is shared out decides.
    pub(crate) fn of<'p>(placements: impl IntoIterator<Item = &'p Placement>, rank: usize) -> Self {
        let shared = placements.into_iter().find_map(|placement| match placement {
            Placement::Shard { lengths, .. } => Some(Cost::Rows { held: lengths.of(rank), of: lengths.total() }),
            Placement::Local | Placement::Fill | Placement::Replicate | Placement::Partial { .. } => None,
        });
        shared.unwrap_or(Cost::Whole)
    }
}

impl<B: Member> Group<B> {
    /// How a dim that nobody shares yet is shared out now.
    pub(crate) fn shares(&self) -> Cow<'_, Shares> {
        match &self.balancer {
            None => Cow::Borrowed(&self.options.shares),
            Some(balancer) => Cow::Owned(balancer.shares()),
        }
    }
}

impl<B: Member> Order<'_, B> {
    /// A step ends: its gradients have been summed. Counted in the order of the program; the shares may be others from
    /// here on.
    pub(crate) fn end_step(&self) {
        let Some(balancer) = &self.group.balancer else { return };
        let step = balancer.count_step();
        if balancer.samples.is_some() {
            self.enqueue(Arc::new(EndOfStep { step }));
        }
        balancer.move_shares(step);
    }
}

/// The shares of a group that may change.
pub(crate) struct Balancer {
    shares: RwLock<Shares>,
    steps: Mutex<Steps>,
    /// Where members put what they measure; `None` if nothing is measured.
    samples: Option<Arc<Samples>>,
}

struct Steps {
    num_ended: u64,
    /// So far, or all of it.
    schedule: ShareSchedule,
    /// `None` for a replay, and for one member.
    auto: Option<Auto>,
}

impl Balancer {
    /// `None` for shares that stay as they are. The options fit the members.
    pub(crate) fn new(options: &ReplicaOptions, num_members: usize) -> Option<Self> {
        let (schedule, samples) = match &options.balance {
            Balance::Fixed => return None,
            Balance::Replay(schedule) => (schedule.clone(), None),
            Balance::Auto => {
                let weights = match &options.shares {
                    Shares::Weighted(weights) => weights.clone(),
                    Shares::Equal | Shares::First(_) => vec![1; num_members],
                };
                let start = ShareSchedule { changes: vec![ShareChange { step: 0, weights }] };
                // Alone, a member has nobody to share with.
                (start, (num_members > 1).then(|| Arc::new(Samples::new(num_members))))
            }
        };
        let shares = schedule.weights_after(0).map_or_else(|| options.shares.clone(), weighted);
        let auto =
            samples.is_some().then(|| Auto { first_step: WARM_UP + 1, costs: vec![StepCost::default(); num_members] });
        let steps = Mutex::new(Steps { num_ended: 0, schedule, auto });
        Some(Self { shares: RwLock::new(shares), steps, samples })
    }

    /// What member `rank` measures with.
    pub(crate) fn meter(&self, rank: usize) -> Option<Meter> {
        self.samples.clone().map(|samples| Meter { rank, samples, tally: RefCell::default() })
    }

    /// What was chosen so far; of a replay, all that is replayed.
    pub(crate) fn schedule(&self) -> ShareSchedule {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).schedule.clone()
    }

    fn shares(&self) -> Shares {
        self.shares.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The number of the step that ends: the first is 1.
    fn count_step(&self) -> u64 {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        steps.num_ended += 1;
        steps.num_ended
    }

    /// Once `step` has ended, shares become what the schedule says, or what the samples say, which is recorded.
    fn move_shares(&self, step: u64) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let Steps { schedule, auto, .. } = &mut *steps;
        if let (Some(auto), Some(samples)) = (auto, &self.samples)
            && let Some(weights) = auto.next_weights(samples, schedule.weights_after(step).unwrap_or_default())
        {
            auto.first_step = step + SETTLING + 1;
            schedule.changes.push(ShareChange { step, weights });
        }
        let is_due = |change: &&ShareChange| change.step == step;
        let change = schedule.changes.iter().rev().find(is_due).cloned();
        drop(steps);
        if let Some(ShareChange { weights, .. }) = change {
            tracing::info!(step, ?weights, "shares of the members change");
            *self.shares.write().unwrap_or_else(PoisonError::into_inner) = Shares::Weighted(weights);
        }
    }
}

fn weighted(weights: &[u32]) -> Shares {
    Shares::Weighted(weights.to_vec())
}

/// Chooses shares from what the members measured.
struct Auto {
    /// Earlier steps do not count.
    first_step: u64,
    /// The last that is known of each member.
    costs: Vec<StepCost>,
}

impl Auto {
    /// Other weights than the present ones, if the members have measured enough steps and would gain by it.
    fn next_weights(&mut self, samples: &Samples, present: &[u32]) -> Option<Vec<u32>> {
        let window = samples.take(self.first_step)?;
        self.costs = self.costs_in(&window, 0..WINDOW);
        let num_rows = window.iter().flatten().map(|sample| sample.num_rows as f64).filter(|&num_rows| num_rows > 0.0);
        let num_rows = median(num_rows) as usize;
        tracing::debug!(costs = ?self.costs, num_rows, ?present, "members measured");
        let weights = balance(&self.costs, present, num_rows)?;
        // What is worth it on the whole but not in each half is noise.
        let is_worth_it = |steps| {
            let costs = self.costs_in(&window, steps);
            gain(&costs, present, &weights, num_rows).is_some_and(|gain| gain > MIN_GAIN)
        };
        (is_worth_it(0..WINDOW / 2) && is_worth_it(WINDOW / 2..WINDOW)).then_some(weights)
    }

    /// Of each member, in some steps of the window.
    fn costs_in(&self, window: &[Vec<Sample>], steps: Range<usize>) -> Vec<StepCost> {
        let costs = self.costs.iter().zip(window).map(|(known, samples)| {
            let median_of = |seconds: fn(&StepCost) -> f64| {
                median(samples[steps.clone()].iter().map(|sample| seconds(&sample.cost)))
            };
            let all_rows_seconds = median_of(|cost| cost.all_rows_seconds);
            StepCost {
                // A member that had no rows tells nothing new.
                all_rows_seconds: if all_rows_seconds > 0.0 { all_rows_seconds } else { known.all_rows_seconds },
                fixed_seconds: median_of(|cost| cost.fixed_seconds),
            }
        });
        let mut costs: Vec<StepCost> = costs.collect();
        // A member that never had rows is taken for as slow as the slowest, so that it gets some and is measured.
        let slowest = costs.iter().map(|cost| cost.all_rows_seconds).fold(0.0, f64::max);
        for cost in costs.iter_mut().filter(|cost| cost.all_rows_seconds <= 0.0) {
            cost.all_rows_seconds = slowest;
        }
        costs
    }
}

/// The larger of the two in the middle, of an even number; 0 of none.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// What one member measured in one step.
#[derive(Clone, Copy, Debug)]
struct Sample {
    step: u64,
    cost: StepCost,
    /// Of the batch, or of what the members share instead; 0 if nothing was shared.
    num_rows: usize,
}

/// What the members measured that nobody has looked at yet, by rank and in the order of steps.
struct Samples(Box<[Mutex<Vec<Sample>>]>);

impl Samples {
    fn new(num_members: usize) -> Self {
        Self((0..num_members).map(|_| Mutex::default()).collect())
    }

    fn push(&self, rank: usize, sample: Sample) {
        self.0[rank].lock().unwrap_or_else(PoisonError::into_inner).push(sample);
    }

    /// The oldest [`WINDOW`] samples of each member, forgetting those of steps before `first_step`; `None` while some
    /// member has fewer.
    fn take(&self, first_step: u64) -> Option<Vec<Vec<Sample>>> {
        let members = || self.0.iter().map(|samples| samples.lock().unwrap_or_else(PoisonError::into_inner));
        let count = |samples: &mut Vec<Sample>| {
            samples.retain(|sample| sample.step >= first_step);
            samples.len()
        };
        let is_full = members().map(|mut samples| count(&mut samples)).min().is_some_and(|least| least >= WINDOW);
        is_full.then(|| members().map(|mut samples| samples.drain(..WINDOW).collect()).collect())
    }
}

/// Measures the tasks of one member, on its thread.
pub(crate) struct Meter {
    rank: usize,
    samples: Arc<Samples>,
    tally: RefCell<Tally>,
}

/// What a member has measured since the last step ended.
#[derive(Default)]
struct Tally {
    cost: StepCost,
    /// Seconds of tasks on shared rows, by the number of rows.
    seconds_by_rows: Vec<(usize, f64)>,
    /// That of the last task on shared rows.
    shared: Option<Cost>,
}

impl Meter {
    /// Runs a task and counts what time it takes. A device may still compute when the task returns: it is waited for
    /// before a collective, and where a step's work on shared rows begins.
    ///
    /// # Errors
    ///
    /// As the task.
    ///
    /// # Panics
    ///
    /// As the task, and with the inner backend's error if its device fails.
    pub(crate) fn run<B: Member>(&self, task: &dyn Task<B>, member: &MemberContext<B>) -> Result<(), CollectiveError> {
        match task.cost(member.rank) {
            Cost::Unmeasured => task.run(member),
            Cost::Collective => {
                self.wait_for::<B>(&member.device);
                let result = task.run(member);
                // What is left of it is no work of this member's.
                sync::<B>(&member.device);
                result
            }
            cost @ (Cost::Whole | Cost::Rows { .. }) => {
                if cost != Cost::Whole && self.tally.borrow().shared.is_none() {
                    self.wait_for::<B>(&member.device);
                }
                let start = Instant::now();
                let result = task.run(member);
                self.tally.borrow_mut().add(cost, start.elapsed().as_secs_f64());
                result
            }
        }
    }

    /// What the device still computes belongs to the tasks on shared rows, once a step has had one.
    fn wait_for<B: Member>(&self, device: &B::Device) {
        let start = Instant::now();
        sync::<B>(device);
        let mut tally = self.tally.borrow_mut();
        let cost = tally.shared.unwrap_or(Cost::Whole);
        tally.add(cost, start.elapsed().as_secs_f64());
    }

    fn end_step(&self, step: u64) {
        let tally = self.tally.take();
        let num_rows = tally.num_rows();
        self.samples.push(self.rank, Sample { step, cost: tally.cost, num_rows });
    }
}

/// # Panics
///
/// With the inner backend's error.
fn sync<B: Member>(device: &B::Device) {
    B::sync(device).unwrap_or_else(|error| panic!("{error}"));
}

impl Tally {
    fn add(&mut self, cost: Cost, seconds: f64) {
        const MAX_NUMBERS: usize = 64;
        let Cost::Rows { held: held @ 1.., of } = cost else {
            self.cost.fixed_seconds += seconds;
            return;
        };
        self.shared = Some(cost);
        self.cost.all_rows_seconds += seconds * of as f64 / held as f64;
        let known = self.seconds_by_rows.iter().position(|(num_rows, _)| *num_rows == of);
        match known {
            Some(index) => self.seconds_by_rows[index].1 += seconds,
            None if self.seconds_by_rows.len() < MAX_NUMBERS => self.seconds_by_rows.push((of, seconds)),
            // No step has this many; what never ends one (evaluation) may.
            None => {}
        }
    }

    /// The rows that are shared out: the fewest that matter. Where a batch is viewed as more rows than it has items
    /// (BatchNorm, a loss per token), shares follow those of the items.
    fn num_rows(&self) -> usize {
        /// The part of the time that tasks on few rows must take to matter.
        const MATTERS: f64 = 0.1;
        let mut seconds_by_rows = self.seconds_by_rows.clone();
        seconds_by_rows.sort_by_key(|&(num_rows, _)| num_rows);
        let all: f64 = seconds_by_rows.iter().map(|(_, seconds)| seconds).sum();
        let mut sum = 0.0;
        let matters = |(_, seconds): &&(usize, f64)| {
            sum += seconds;
            sum >= MATTERS * all
        };
        seconds_by_rows.iter().find(matters).map_or(0, |&(num_rows, _)| num_rows)
    }
}

/// The members' side of the end of a step.
struct EndOfStep {
    step: u64,
}

impl<B: Member> Task<B> for EndOfStep {
    fn operation(&self) -> &'static str {
        "end of a step"
    }

    fn run(&self, member: &MemberContext<B>) -> Result<(), CollectiveError> {
        if let Some(meter) = &member.meter {
            meter.end_step(self.step);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: usize = 60;

    /// Two members whose rows cost this much.
    struct Pair {
        balancer: Balancer,
        rates: [f64; 2],
    }

    impl Pair {
        fn new(rates: [f64; 2]) -> Self {
            let options = ReplicaOptions { balance: Balance::Auto, ..Default::default() };
            Self { balancer: Balancer::new(&options, 2).unwrap(), rates }
        }

        /// Runs steps in which members are `delay` steps behind the caller.
        fn run(&self, num_steps: u64, delay: u64) {
            for _ in 0..num_steps {
                let step = self.balancer.count_step();
                if let Some(measured) = step.checked_sub(delay).filter(|&measured| measured > 0) {
                    self.measure(measured, self.rates);
                }
                self.balancer.move_shares(step);
            }
        }

        fn measure(&self, step: u64, rates: [f64; 2]) {
            for (rank, rate) in rates.into_iter().enumerate() {
                let cost = StepCost { all_rows_seconds: rate, fixed_seconds: 0.1 };
                let samples = self.balancer.samples.as_ref().unwrap();
                samples.push(rank, Sample { step, cost, num_rows: ROWS });
            }
        }

        fn changes(&self) -> Vec<(u64, Vec<u32>)> {
            let schedule = self.balancer.schedule();
            schedule.validate(2).unwrap();
            schedule.changes.into_iter().map(|change| (change.step, change.weights)).collect()
        }
    }

    #[test]
    fn a_slow_member_is_seen_once_a_window_after_the_warm_up_is_full_and_once_only() {
        let pair = Pair::new([2.0, 1.0]);
        pair.run(WARM_UP + WINDOW as u64 - 1, 0);
        assert_eq!(pair.changes(), [(0, vec![1, 1])]);
        pair.run(1, 0);
        let expected = [(0, vec![1, 1]), (WARM_UP + WINDOW as u64, vec![20, 40])];
        assert_eq!(pair.changes(), expected);
        assert_eq!(pair.balancer.shares(), Shares::Weighted(vec![20, 40]));
        pair.run(100, 0);
        assert_eq!(pair.changes(), expected);
    }

    #[test]
    fn a_member_that_recovers_gets_its_share_back() {
        let mut pair = Pair::new([40.0, 1.0]);
        pair.run(20, 3);
        pair.rates = [1.0, 1.0];
        pair.run(40, 3);
        let weights: Vec<_> = pair.changes().into_iter().map(|(_, weights)| weights).collect();
        assert_eq!(weights, [vec![1, 1], vec![1, 59], vec![30, 30]]);
    }

    #[test]
    fn a_member_that_starts_without_a_row_gets_some() {
        let shares = Shares::Weighted(vec![1000, 1]);
        let options = ReplicaOptions { balance: Balance::Auto, shares, ..Default::default() };
        let mut pair = Pair { balancer: Balancer::new(&options, 2).unwrap(), rates: [1.0, 0.0] };
        pair.run(WARM_UP + WINDOW as u64, 0);
        assert_eq!(pair.changes().last(), Some(&(WARM_UP + WINDOW as u64, vec![30, 30])));
        // Then it is measured like any other.
        pair.rates = [1.0, 2.0];
        pair.run(20, 0);
        assert_eq!(pair.changes().last().map(|(_, weights)| weights.clone()), Some(vec![40, 20]));
    }

    /// Members may be steps behind when shares change: those steps still have the old ones.
    #[test]
    fn steps_before_a_change_and_the_first_one_after_it_do_not_count() {
        let mut pair = Pair::new([2.0, 1.0]);
        pair.run(WARM_UP + WINDOW as u64, 0);
        let changed = pair.balancer.steps.lock().unwrap().num_ended;
        assert_eq!(pair.changes().len(), 2);
        let misleading = [9.0, 1.0];
        pair.rates = misleading;
        for step in [changed - 1, changed, changed + 1] {
            pair.measure(step, misleading);
        }
        pair.rates = [2.0, 1.0];
        let step = pair.balancer.count_step();
        pair.balancer.move_shares(step);
        pair.run(50, 0);
        assert_eq!(pair.changes().len(), 2);
    }

    #[test]
    fn one_slow_step_among_many_changes_nothing() {
        let mut pair = Pair::new([1.0, 1.0]);
        for _ in 0..10 {
            pair.run(7, 0);
            pair.rates = [30.0, 1.0];
            pair.run(1, 0);
            pair.rates = [1.0, 1.0];
        }
        assert_eq!(pair.changes(), [(0, vec![1, 1])]);
    }

    #[test]
    fn what_only_half_of_a_window_says_changes_nothing() {
        let mut pair = Pair::new([1.0, 1.0]);
        pair.run(WARM_UP, 0);
        for _ in 0..5 {
            for rates in [[1.0, 2.5], [2.0, 1.0]] {
                pair.rates = rates;
                pair.run(WINDOW as u64 / 2, 0);
            }
        }
        assert_eq!(pair.changes(), [(0, vec![1, 1])]);
    }

    #[test]
    fn a_replay_moves_at_the_steps_it_was_given_and_measures_nothing() {
        let changes = vec![
            ShareChange { step: 0, weights: vec![3, 1] },
            ShareChange { step: 2, weights: vec![1, 2] },
            ShareChange { step: 3, weights: vec![1, 0] },
        ];
        let schedule = ShareSchedule { changes };
        let options = ReplicaOptions { balance: Balance::Replay(schedule.clone()), ..Default::default() };
        let balancer = Balancer::new(&options, 2).unwrap();
        assert!(balancer.meter(0).is_none());
        let mut found = vec![balancer.shares()];
        for _ in 0..4 {
            let step = balancer.count_step();
            balancer.move_shares(step);
            found.push(balancer.shares());
        }
        assert_eq!(found, [[3, 1], [3, 1], [1, 2], [1, 0], [1, 0]].map(|weights| weighted(&weights)));
        assert_eq!(balancer.schedule(), schedule);
        assert!(Balancer::new(&ReplicaOptions::default(), 2).is_none());
    }

    #[test]
    fn seconds_on_a_part_count_as_those_of_all_rows() {
        let mut tally = Tally::default();
        tally.add(Cost::Whole, 1.0);
        tally.add(Cost::Rows { held: 1, of: 4 }, 0.5);
        tally.add(Cost::Rows { held: 200, of: 400 }, 3.0);
        tally.add(Cost::Rows { held: 0, of: 2 }, 0.25);
        assert_eq!(tally.cost, StepCost { all_rows_seconds: 2.0 + 6.0, fixed_seconds: 1.25 });
        assert_eq!(tally.num_rows(), 4);
        // What takes next to no time does not say how many rows there are.
        tally.add(Cost::Rows { held: 1, of: 2 }, 0.01);
        assert_eq!(tally.num_rows(), 4);
        assert_eq!(Tally::default().num_rows(), 0);
    }

    #[test]
    fn a_task_on_parts_costs_by_its_rows_and_any_other_the_same_everywhere() {
        let shard = Placement::shard(1, [3, 5]);
        assert_eq!(Cost::of([&Placement::Replicate, &shard], 0), Cost::Rows { held: 3, of: 8 });
        assert_eq!(Cost::of([&Placement::Replicate], 1), Cost::Whole);
        assert_eq!(Cost::of([], 1), Cost::Whole);
    }
}
