//! What members hold of a training step, by their number: bytes, which no load of the machine changes.

use bonfire::{BytesByKind, MemberMemory, ReplicaDevice, ReplicaOptions, Spread};
use burn_flex::{Flex, FlexDevice};

use crate::{
    contenders::{Replicated, trainer},
    subjects::Cnn,
};

/// Divisible by each number of members.
const BATCH_SIZE: usize = 240;
const MAX_MEMBERS: usize = 4;

/// Steps of the CNN with Adam at one global batch size, on 1 to [`MAX_MEMBERS`] members: a line per figure and number.
pub fn report() {
    let reports: Vec<_> = (1..=MAX_MEMBERS).map(steps).collect();
    for (members, num_members) in reports.iter().zip(1..) {
        let largest = |bytes: fn(&MemberMemory) -> u64| {
            let of = |members: &[MemberMemory]| members.iter().map(bytes).max().expect("a member");
            (of(members), of(&reports[0]))
        };
        let plural = if num_members == 1 { "" } else { "s" };
        let name = |what: &str| format!("CNN, batch {BATCH_SIZE}, {num_members} member{plural}: {what}");
        let activations = largest(|member| member.most.activations);
        print(&name("most activations of a member"), activations, Some(1.05 / num_members as f64));
        print(&name("peak of a member"), largest(|member| member.peak.total()), None);
        let lasting = |BytesByKind { parameters, optimizer_state, .. }: BytesByKind| parameters + optimizer_state;
        let between_steps = members.iter().map(|member| lasting(member.live)).max().expect("a member");
        let between_steps_of_one = lasting(reports[0][0].live);
        print(&name("parameters and optimizer state of a member"), (between_steps, between_steps_of_one), None);
        let totals = || members.iter().map(|member| member.peak.total());
        let (most, least) = (totals().max().unwrap_or(0), totals().min().unwrap_or(0));
        print(&name("largest peak over the smallest member's"), (most, least), Some(1.05));
    }
}

/// Three steps, of which the first, in which parameters come from home, is not counted.
fn steps(num_members: usize) -> Vec<MemberMemory> {
    // One member too is to hold what it computes.
    let options = ReplicaOptions { spread: Spread::OnHeavyOp { min_work: 1 << 19 }, ..Default::default() };
    let device = ReplicaDevice::<Flex>::with_options(vec![FlexDevice; num_members], options).expect("members");
    let mut step = trainer::<Replicated, Cnn>(device.clone(), BATCH_SIZE);
    step();
    device.reset_peak_memory();
    step();
    step();
    let report = device.memory_report();
    eprintln!("{num_members} members\n{report}");
    report.members
}

/// Bytes, and their ratio to a baseline.
fn print(name: &str, (bytes, baseline): (u64, u64), at_most: Option<f64>) {
    let (ratio, mib) = (bytes as f64 / baseline as f64, bytes as f64 / f64::from(1 << 20));
    let goal = at_most.map_or("null".into(), |goal| format!("{goal:.3}"));
    let ok = at_most.is_none_or(|goal| ratio <= goal);
    println!("{{\"name\":\"{name}\",\"ratio\":{ratio:.3},\"mib\":{mib:.3},\"goal\":{goal},\"ok\":{ok}}}");
}
