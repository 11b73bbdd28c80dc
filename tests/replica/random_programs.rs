//! Random programs of operations that move, pick, replace and scan rows, along shared dims and others, with their
//! gradients, against one device.

use bonfire::{Replica, ReplicaDevice, ReplicaOptions, Shares};
use burn::{
    backend::Autodiff,
    tensor::{
        IndexingUpdateOp, Int, Slice, Tensor, TensorData,
        activation::{log_softmax, softmax},
        backend::Backend,
    },
};
use burn_flex::{Flex, FlexDevice};

use super::runs::{ALWAYS, floats};

const NUM_PROGRAMS: u64 = 150;
const NUM_STEPS: usize = 6;
const MAX_ELEMENTS: usize = 4000;

/// The steps of one program, decided by its number.
struct Choices(u64);

impl Choices {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % bound as u64) as usize
    }

    /// A range with a row at least, and a step.
    fn slice(&mut self, length: usize) -> Slice {
        let start = self.below(length);
        let end = start + 1 + self.below(length - start);
        let step = [1, 1, 1, 2, 3, -1, -2][self.below(7)];
        Slice::new(start as isize, Some(end as isize), step)
    }

    fn indices<B: Backend>(&mut self, num: usize, below: usize, device: &B::Device) -> Tensor<B, 1, Int> {
        let values: Vec<i64> = (0..num).map(|_| self.below(below) as i64).collect();
        Tensor::from_data(TensorData::from(&values[..]), device)
    }
}

type Grad<B> = Tensor<Autodiff<B>, 3>;

/// One step, its name, and whether elements may be equal after it.
fn step<B: Backend>(x: Grad<B>, choices: &mut Choices, has_ties: &mut bool) -> (Grad<B>, &'static str) {
    let device = x.device();
    let shape = x.dims();
    let dim = choices.below(3);
    let length = shape[dim];
    let is_small = shape.iter().product::<usize>() * 2 <= MAX_ELEMENTS;
    let repeats = |has_ties: &mut bool| *has_ties = true;
    match choices.below(19) {
        0 | 1 => (x.slice_dim(dim, choices.slice(length)), "slice"),
        2 | 3 => {
            let (slice, other) = (choices.slice(length), choices.below(2));
            let value = x.clone().slice_dim(dim, slice).mul_scalar(0.5);
            let target = if other == 0 { x.clone() } else { Tensor::zeros(shape, &device) };
            repeats(has_ties);
            let mut slices = vec![Slice::full(); 3];
            slices[dim] = slice;
            (target.slice_assign(&slices, value), "slice_assign")
        }
        4 => (x.flip([dim as isize, ((dim + 1) % 3) as isize]), "flip"),
        5 if is_small => {
            repeats(has_ties);
            (x.repeat_dim(dim, 2), "repeat_dim")
        }
        6 if is_small => {
            repeats(has_ties);
            let head = x.clone().slice_dim(dim, choices.slice(length));
            (Tensor::cat(vec![head, x], dim), "cat")
        }
        7 => {
            let [a, b, c] = shape;
            let to = [[a * b, c, 1], [1, a, b * c], [b, a, c], [c, a * b, 1], [a * c, 1, b], [b * c, a, 1]];
            (x.reshape(to[choices.below(6)]), "reshape")
        }
        8 if length > 1 && is_small => {
            repeats(has_ties);
            let windows: Tensor<Autodiff<B>, 4> = x.unfold(dim, 2, 1);
            let [a, b, c, _] = windows.dims();
            (windows.reshape([a, b, 2 * c]), "unfold")
        }
        9 => (x.cumsum(dim).tanh(), "cumsum"),
        10 => (softmax(x, dim) * 4.0, "softmax"),
        11 => (log_softmax(x, dim) * 0.25, "log_softmax"),
        12 => {
            repeats(has_ties);
            let num = length.min(8);
            (x.select(dim, choices.indices(num, length, &device)), "select")
        }
        13 => {
            repeats(has_ties);
            let indices = choices.indices(shape.iter().product(), length, &device).reshape(shape);
            (x.gather(dim, indices), "gather")
        }
        14 => {
            let indices = choices.indices(shape.iter().product(), length, &device).reshape(shape);
            repeats(has_ties);
            (x.clone().scatter(dim, indices, x * 0.5, IndexingUpdateOp::Add).tanh(), "scatter")
        }
        15 => {
            let indices = choices.indices(length, length, &device);
            repeats(has_ties);
            (x.clone().select_assign(dim, indices, x * 0.5, IndexingUpdateOp::Add).tanh(), "select_assign")
        }
        16 => {
            let mean = x.clone().mean_dim(dim);
            (x - mean, "mean_dim")
        }
        17 if !*has_ties => (x.sort(dim), "sort"),
        18 => {
            let (rows, slots) = (choices.indices(5, shape[0], &device), choices.indices(5, shape[0], &device));
            repeats(has_ties);
            let picked: Tensor<Autodiff<B>, 3> = x.clone().gather_nd(rows.reshape([5, 1]));
            let slots: Tensor<_, 2, Int> = slots.reshape([5, 1]);
            (x.scatter_nd(slots, picked * 0.5, IndexingUpdateOp::Add).tanh(), "gather_nd and scatter_nd")
        }
        _ => (x.permute([2, 0, 1]), "permute"),
    }
}

/// What a program gives, with the gradients of its input and of its weight; and its steps.
fn run<B: Backend>(number: u64, device: &B::Device) -> (Vec<TensorData>, String) {
    let mut choices = Choices(number);
    let mut has_ties = false;
    let input = floats::<Autodiff<B>, 3>(number, [6, 4, 5], device).require_grad();
    let weight = floats::<Autodiff<B>, 3>(number + 1, [1, 5, 5], device).require_grad();
    let mut x = input.clone().matmul(weight.clone());
    let mut steps = Vec::new();
    for _ in 0..NUM_STEPS {
        let (next, name) = step(x, &mut choices, &mut has_ties);
        steps.push(format!("{name} to {:?}", next.dims()));
        x = next;
    }
    let scale = floats::<Autodiff<B>, 3>(number + 2, x.dims(), device);
    let grads = (x.clone() * x.clone() * scale).sum().backward();
    let of = |tensor: &Grad<B>| tensor.grad(&grads).expect("it was used").into_data();
    (vec![x.into_data(), of(&input), of(&weight)], steps.join(", "))
}

fn assert_close(found: &TensorData, expected: &TensorData, context: &str) {
    assert_eq!((&found.shape, found.dtype), (&expected.shape, expected.dtype), "{context}");
    // Sums over some hundred elements in another order.
    let largest = expected.iter::<f64>().fold(1.0, |largest: f64, value| largest.max(value.abs()));
    for (ours, theirs) in found.iter::<f64>().zip(expected.iter::<f64>()) {
        assert!((ours - theirs).abs() <= 2e-5 * largest, "{context}: {ours}, on one device {theirs}");
    }
}

#[test]
fn random_programs_and_their_gradients_are_those_of_one_device() {
    let expected: Vec<_> = (0..NUM_PROGRAMS).map(|number| run::<Flex>(number, &FlexDevice)).collect();
    let shares = [
        (1, Shares::Equal),
        (2, Shares::Equal),
        (3, Shares::Weighted(vec![3, 0, 1])),
        (3, Shares::Weighted(vec![1, 2, 4])),
        (4, Shares::Equal),
    ];
    for (num_members, shares) in shares {
        let timeout = std::time::Duration::from_secs(60);
        let options = ReplicaOptions { spread: ALWAYS, shares: shares.clone(), timeout, ..Default::default() };
        let device = ReplicaDevice::<Flex>::with_options(vec![FlexDevice; num_members], options).unwrap();
        for (number, (expected, steps)) in expected.iter().enumerate() {
            let (found, _) = run::<Replica<Flex>>(number as u64, &device);
            let (again, _) = run::<Replica<Flex>>(number as u64, &device);
            for (index, (found, again)) in found.iter().zip(&again).enumerate() {
                let context = format!("result {index} of {steps}; on {num_members} members, {shares:?}");
                assert_eq!(found.bytes, again.bytes, "another run differs in {context}");
                assert_close(found, &expected[index], &context);
            }
        }
    }
}
