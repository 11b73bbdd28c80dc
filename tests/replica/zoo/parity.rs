//! A program on 1 to 4 members against the plain backend: numbers, bits, collectives, records.

use bonfire::{
    Replica,
    collectives::{Collective, Tally},
};
use burn::{
    backend::{
        Autodiff,
        autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing},
    },
    tensor::{Distribution, Tensor, backend::Backend},
};
use burn_flex::{Flex, FlexDevice};

use super::{
    super::runs::{ALWAYS, draw_alone, replica},
    journal::{Journal, NUM_STEPS, Program, Saved, Trace},
};

/// What is expected of a program on members.
pub struct Expected {
    /// How far losses, gradients, parameters and outputs may be from those of the plain backend. Losses relative to the
    /// larger of 1 and the loss, all else in norm, relative to the norm.
    pub tolerance: f64,
    /// The all_reduces of a step in steady state, from the third one on.
    pub all_reduces: u64,
    /// The other collectives of such a step. They are exceptions, with a reason.
    pub others: u64,
}

impl Expected {
    /// Sums over members are made in another order than on one device, and twenty steps carry that on. Measured: losses
    /// within 2e-7, parameters within 1e-6, where the optimizer does not amplify it.
    pub const fn new(all_reduces: u64) -> Self {
        Self { tolerance: 1e-5, all_reduces, others: 0 }
    }
}

struct Run {
    trace: Trace,
    saved: Saved,
    loaded_outputs: Vec<f64>,
    /// One per step.
    tallies: Vec<Tally>,
}

/// # Panics
///
/// If a run on members differs from the plain backend's by more than is expected, or from a second run by a bit, if a
/// step takes other collectives, or if a record does not survive the way to a replica and back.
pub fn equals_one_device<P: Program>(expected: Expected) {
    equals_one_device_with::<P, NoCheckpointing>(expected);
}

/// As [`equals_one_device`], with a strategy that says which activations are kept for the backward pass.
pub fn equals_one_device_with<P: Program, C: CheckpointStrategy>(expected: Expected) {
    let _alone = draw_alone();
    let plain = run::<Autodiff<Flex, C>, P>(&FlexDevice, Saved::default(), Tally::default);
    assert_eq!(plain.trace.losses.len() as u64 % NUM_STEPS, 0);
    assert!(!plain.trace.parameters.is_empty() && !plain.trace.outputs.is_empty());
    for num_members in 1..=4 {
        let on_members = || {
            let device = replica::<Flex>(num_members, ALWAYS);
            let tally = || {
                <Replica<Flex> as Backend>::sync(&device).unwrap();
                device.collectives().tally()
            };
            run::<Autodiff<Replica<Flex>, C>, P>(&device, plain.saved.clone(), tally)
        };
        let found = on_members();
        let context = format!("{num_members} members");
        assert_close(&found, &plain, expected.tolerance, &context);
        for (step, tally) in found.tallies.iter().enumerate().skip(2) {
            let num_calls = tally.num_calls(Collective::AllReduce);
            assert_eq!(num_calls, expected.all_reduces, "{context}, step {step}: {tally}");
            assert_eq!(tally.total_calls(), num_calls + expected.others, "{context}, step {step}: {tally}");
        }
        if num_members == 3 {
            assert_eq!(on_members().trace, found.trace, "two runs on {context}");
        }
    }
}

fn run<B: burn::tensor::backend::AutodiffBackend, P: Program>(
    device: &B::Device,
    others: Saved,
    tally: impl Fn() -> Tally,
) -> Run {
    B::seed(device, 7);
    let mut tallies = vec![];
    let mut before = tally();
    let mut between_steps = || {
        let now = tally();
        tallies.push(now - before);
        before = now;
    };
    let mut journal = Journal::new(others, &mut between_steps);
    P::train::<B>(device, &mut journal);
    // The stream of random numbers is where it is on one device, whatever the program drew from it.
    journal.exact(Tensor::<B, 1>::random([5], Distribution::Default, device).into_data());
    let Journal { trace, saved, loaded_outputs, .. } = journal;
    Run { trace, saved, loaded_outputs, tallies }
}

fn assert_close(found: &Run, plain: &Run, tolerance: f64, context: &str) {
    assert_eq!(found.trace.exact, plain.trace.exact, "{context}: draws and choices");
    assert_eq!(found.trace.losses.len(), plain.trace.losses.len(), "{context}");
    for (index, (ours, theirs)) in found.trace.losses.iter().zip(&plain.trace.losses).enumerate() {
        let limit = tolerance * theirs.abs().max(1.0);
        assert!((ours - theirs).abs() <= limit, "{context}: loss {index} is {ours}, on one device {theirs}");
    }
    assert_eq!(found.trace.parameters.len(), plain.trace.parameters.len(), "{context}: number of parameters");
    for (index, (ours, theirs)) in found.trace.parameters.iter().zip(&plain.trace.parameters).enumerate() {
        assert_near(ours, theirs, tolerance, 0.1, &format!("{context}: parameter {index}"));
    }
    // A gradient that is zero in theory is rounding alone: it is measured by the others.
    let total = norm(plain.trace.gradients.iter().flatten().copied());
    assert_eq!(found.trace.gradients.len(), plain.trace.gradients.len(), "{context}: number of gradients");
    for (index, (ours, theirs)) in found.trace.gradients.iter().zip(&plain.trace.gradients).enumerate() {
        assert_near(ours, theirs, tolerance, total / 10.0, &format!("{context}: gradient {index}"));
    }
    assert_near(&found.trace.outputs, &plain.trace.outputs, tolerance, 0.1, &format!("{context}: outputs"));
    let loaded = format!("{context}: outputs of what is loaded");
    assert_near(&found.loaded_outputs, &plain.trace.outputs, tolerance, 0.1, &loaded);
}

/// In norm, relative to the larger of the norm and `least`.
pub fn assert_near(ours: &[f64], theirs: &[f64], tolerance: f64, least: f64, context: &str) {
    assert_eq!(ours.len(), theirs.len(), "{context}");
    let distance = norm(ours.iter().zip(theirs).map(|(a, b)| a - b));
    let limit = tolerance * norm(theirs.iter().copied()).max(least);
    assert!(distance <= limit, "{context} is off by {distance:e}, allowed {limit:e}");
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}
