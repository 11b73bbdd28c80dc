//! Training steps on a replica against the same steps without one, interleaved in one run.
//!
//! `cargo xtask bench steps` prints a JSON line per figure. A round measures every contender once, one after the other,
//! and does not count if the host took more than 5 % of the CPU time. A figure is the median of the rounds' ratios; its
//! goal is met if it lies on the good side of the 95 % interval of that median, or inside.

#![allow(unreachable_pub)]

mod contenders;
mod memory;
/// Flex whose devices can be slowed down; the tests use more of it.
#[allow(dead_code, unused_imports)]
#[path = "../../tests/replica/probe/mod.rs"]
mod probe;
mod rounds;
mod subjects;

use bonfire::{Balance, Shares};
use contenders::{Contender, controller, free_threads, plain, replica, slowed, steps_on_members};
use rounds::{Goal, Rounds, print_value, resident_bytes};
use subjects::{
    Autoencoder256, Cnn, Gru, LeNet28, Lstm, Mlp, NarrowResNet18, ResNet18, SmallGpt, Subject, Tiny, Transformer,
    TransformerWithDropout, UNet48, Vae784,
};

/// `cargo bench --bench steps -- tiny` measures only the figures whose group has that word: cnn, mlp, tiny, controller,
/// memory, shares, soak, resnet, transformer, gpt, lenet, unet, lstm, gru, vae, autoencoder.
fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_wanted = |group: &str| wanted.is_empty() || wanted.iter().any(|word| group.contains(word.as_str()));
    if is_wanted("cnn") {
        compare::<Cnn>("CNN, batch 64", 64, Goal::AtMost(1.05), Goal::AtLeast(0.92));
        compare::<Cnn>("CNN, batch 256", 256, Goal::None, Goal::AtLeast(0.92));
    }
    if is_wanted("mlp") {
        compare::<Mlp>("MLP, batch 256", 256, Goal::AtMost(1.05), Goal::AtLeast(0.85));
    }
    if is_wanted("tiny") {
        let rounds = Rounds::measure(vec![plain::<Tiny>(4, 1, 200), replica::<Tiny>(4, 2, 1, 200)]);
        rounds.report("tiny MLP, batch 4: time on 2 members over plain", 1, 0, Goal::AtMost(1.1));
    }
    if is_wanted("shares") {
        shares();
    }
    if is_wanted("controller") {
        let rounds = Rounds::measure(vec![controller(2)]);
        rounds.report_micros("controller, per operation and member", 0, Goal::AtMost(2.0));
    }
    if is_wanted("soak") {
        soak(100_000);
    }
    // The zoo of the tests, in sizes whose step takes more than 5 ms.
    let (one, two) = (Goal::AtMost(1.03), Goal::AtLeast(0.9));
    if is_wanted("resnet") {
        compare::<ResNet18>("ResNet-18, 32 x 32, batch 64", 64, one, two);
        compare::<NarrowResNet18>("ResNet-18 of a quarter of the channels, batch 64", 64, one, Goal::None);
    }
    if is_wanted("transformer") {
        compare::<Transformer>("transformer, batch 32", 32, one, two);
        compare::<TransformerWithDropout>("transformer with dropout, batch 32", 32, one, Goal::None);
    }
    if is_wanted("gpt") {
        compare::<SmallGpt>("GPT, batch 16", 16, one, Goal::None);
    }
    if is_wanted("lenet") {
        compare::<LeNet28>("LeNet, batch 128", 128, one, Goal::None);
    }
    if is_wanted("unet") {
        compare::<UNet48>("UNet, batch 8", 8, one, Goal::None);
    }
    if is_wanted("lstm") {
        compare::<Lstm>("LSTM, batch 64", 64, one, Goal::None);
    }
    if is_wanted("gru") {
        compare::<Gru>("GRU, batch 64", 64, one, Goal::None);
    }
    if is_wanted("vae") {
        compare::<Vae784>("VAE, batch 256", 256, one, Goal::None);
    }
    if is_wanted("autoencoder") {
        compare::<Autoencoder256>("autoencoder, batch 64", 64, one, Goal::None);
    }
    if is_wanted("memory") {
        memory::report();
    }
}

/// Very many steps on two members: what the process holds must not grow.
fn soak(num_steps: usize) {
    let warm_up = num_steps / 10;
    let mut step = steps_on_members::<Tiny>(4);
    (0..warm_up).for_each(|_| step());
    let before = resident_bytes();
    (warm_up..num_steps).for_each(|_| step());
    let name = format!("soak: memory after {num_steps} steps over that after {warm_up}");
    print_value(&name, resident_bytes() / before, Goal::AtMost(1.02));
}

/// Shares by measured speed, with and without a member that is slow.
fn shares() {
    /// The first rounds, which do not count, have steps enough for `auto` to choose.
    const NUM_STEPS: usize = 12;
    let contender = |shares, balance, factor| slowed::<Cnn>(64, factor, shares, balance, NUM_STEPS);
    let rounds = Rounds::measure(vec![
        contender(Shares::Equal, Balance::Fixed, 2.0),
        contender(Shares::Equal, Balance::Auto, 2.0),
        contender(Shares::Weighted(vec![2, 1]), Balance::Fixed, 2.0),
        contender(Shares::Equal, Balance::Fixed, 1.0),
        contender(Shares::Equal, Balance::Auto, 1.0),
    ]);
    let name = "CNN, batch 64, 1 of 2 members slowed by 2";
    rounds.report(&format!("{name}: rate with auto over equal shares"), 0, 1, Goal::AtLeast(1.25));
    rounds.report(&format!("{name}: rate with auto over weights 2,1"), 2, 1, Goal::None);
    rounds.report("CNN, batch 64, 2 members: time with auto over equal shares", 4, 3, Goal::AtMost(1.05));
}

/// One model at one batch size: on one member with all cores, and on two with a core each.
fn compare<S: Subject>(name: &str, batch_size: usize, one_member: Goal, two_members: Goal) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let contenders: Vec<Contender> = vec![
        plain::<S>(batch_size, 1, 1),
        plain::<S>(batch_size, cores, 1),
        free_threads::<S>(batch_size, 2, 1),
        replica::<S>(batch_size, 1, cores, 1),
        replica::<S>(batch_size, 2, 1, 1),
    ];
    let rounds = Rounds::measure(contenders);
    // The step time's ratio; and, the other way round, that of items per second.
    rounds.report(&format!("{name}: time on 1 member over plain, all cores"), 3, 1, one_member);
    rounds.report(&format!("{name}: rate on 2 members over two free threads"), 2, 4, two_members);
    rounds.report(&format!("{name}: rate on 2 members over plain, 1 thread"), 0, 4, Goal::None);
    rounds.report(&format!("{name}: rate on 2 members over plain, all cores"), 1, 4, Goal::None);
}
