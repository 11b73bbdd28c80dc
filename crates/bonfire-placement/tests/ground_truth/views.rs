use bonfire_placement::{Op, Operand, Placement, Shares};
use proptest::prelude::*;

use crate::SHAPES;
use crate::case::{Case, check};

pub(crate) fn reshape(from: &[usize], to: &[usize]) -> Case {
    Case::shaped(Op::Reshape { to: to.to_vec() }, from, to, |part, to| part.reshape(to))
}

fn permute(shape: &[usize], axes: &[usize]) -> Case {
    let own = axes.to_vec();
    Case::new(Op::Permute { axes: axes.to_vec() }, &[shape], move |operands| vec![operands[0].permute(&own)])
}

fn expand(from: &[usize], to: &[usize]) -> Case {
    Case::shaped(Op::Expand { to: to.to_vec() }, from, to, |part, to| part.expand(to))
}

#[test]
fn reshapes_equal_one_device_whatever_is_sharded() {
    let groups: [&[&[usize]]; 8] = [
        &[&[1], &[1, 1], &[1, 1, 1]],
        &[&[7], &[7, 1], &[1, 7], &[1, 7, 1]],
        &[&[6], &[2, 3], &[3, 2], &[1, 6], &[3, 1, 2], &[2, 1, 3, 1]],
        &[&[4, 5], &[20], &[2, 2, 5], &[2, 10], &[5, 4], &[10, 2], &[1, 4, 5, 1]],
        &[&[6, 5], &[2, 3, 5], &[3, 2, 5], &[3, 10], &[30], &[2, 15], &[6, 5, 1]],
        &[&[8], &[2, 2, 2], &[4, 2], &[2, 4], &[2, 1, 4]],
        &[&[3, 2, 2, 2], &[3, 8], &[3, 2, 4], &[6, 4], &[12, 2], &[24], &[4, 6]],
        &[&[0, 3], &[3, 0], &[0], &[2, 0, 5], &[0, 1]],
    ];
    let pairs = |group: &[&[usize]]| -> Vec<Case> {
        group.iter().flat_map(|from| group.iter().map(|to| reshape(from, to))).collect()
    };
    let seen = check(groups.into_iter().flat_map(pairs));
    assert!(seen.num_replicate > 0 && seen.num_shard > 0 && seen.num_partial > 0, "{seen:?}");
}

#[test]
fn rows_that_do_not_go_together_are_exchanged_for_some_that_do() {
    type Row<'a> = (&'a [usize], Placement, &'a [usize], Placement, Placement);
    let table: [Row<'_>; 4] = [
        // An inner dim of a group: its outermost one takes its place.
        (&[5, 3, 4], Placement::shard(1, [2, 1]), &[15, 4], Placement::shard(0, [3, 2]), Placement::shard(0, [9, 6])),
        // Rows of the output that lie on two ranks.
        (&[6, 2], Placement::shard(0, [3, 3]), &[4, 3], Placement::shard(0, [3, 3]), Placement::shard(0, [2, 2])),
        (&[12], Placement::shard(0, [7, 5]), &[4, 3], Placement::shard(0, [6, 6]), Placement::shard(0, [2, 2])),
        // Nothing of the group goes together: another one.
        (&[3, 2, 5], Placement::shard(0, [2, 1]), &[2, 3, 5], Placement::shard(2, [3, 2]), Placement::shard(2, [3, 2])),
    ];
    for (from, given, to, input, output) in table {
        let operand = Operand { placement: &given, shape: from };
        let plan = Op::Reshape { to: to.to_vec() }.plan(&[operand], &Shares::Equal, 2).unwrap();
        assert_eq!((&plan.inputs[..], &plan.outputs[..]), (&[input][..], &[output][..]), "{from:?} to {to:?}");
    }
}

#[test]
fn permutations_equal_one_device_whatever_is_sharded() {
    let orders = |rank: usize| {
        (0..rank).fold(vec![Vec::new()], |orders: Vec<Vec<usize>>, _| {
            let longer = |order: &Vec<usize>, axis: usize| order.iter().copied().chain([axis]).collect::<Vec<_>>();
            let unused = |order: &Vec<usize>| (0..rank).filter(|axis| !order.contains(axis)).collect::<Vec<_>>();
            orders.iter().flat_map(|order| unused(order).into_iter().map(move |axis| longer(order, axis))).collect()
        })
    };
    let cases = SHAPES.iter().flat_map(|shape| orders(shape.len()).into_iter().map(|axes| permute(shape, &axes)));
    let seen = check(cases);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0 && seen.num_partial > 0, "{seen:?}");
}

#[test]
fn expansions_equal_one_device_whatever_is_sharded() {
    let mut cases = vec![expand(&[1], &[0]), expand(&[3, 1], &[3, 0]), expand(&[1, 3], &[0, 3])];
    for shape in SHAPES {
        let longer: Vec<usize> = shape.iter().map(|&length| if length == 1 { 3 } else { length }).collect();
        cases.push(expand(shape, shape));
        cases.push(expand(shape, &longer));
        cases.push(expand(shape, &[&[2], &longer[..]].concat()));
        cases.push(expand(shape, &[&[1, 2], shape].concat()));
    }
    let seen = check(cases);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0 && seen.num_partial > 0, "{seen:?}");
}

/// The primes of a number of elements, grouped into a shape; 1s come in between.
fn shape_of(primes: Vec<usize>) -> impl Strategy<Value = Vec<usize>> {
    let num_primes = primes.len();
    (Just(primes).prop_shuffle(), proptest::collection::vec(0_usize..3, num_primes)).prop_map(|(primes, cuts)| {
        let mut shape = vec![1];
        for (prime, cut) in primes.into_iter().zip(cuts) {
            match cut {
                0 => *shape.last_mut().expect("it starts with one dim") *= prime,
                1 => shape.push(prime),
                _ => shape.extend([1, prime]),
            }
        }
        shape
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_reshape_equals_one_device_whatever_is_sharded(
        (from, to) in proptest::collection::vec(prop_oneof![Just(2_usize), Just(3), Just(5)], 0..5)
            .prop_filter("small", |primes| primes.iter().product::<usize>() <= 60)
            .prop_flat_map(|primes| (shape_of(primes.clone()), shape_of(primes)))
    ) {
        reshape(&from, &to).check();
    }
}
