use bonfire_placement::{Cut, Lengths, Op, Operand, Placement, Shares};

use crate::SHAPES;
use crate::case::{Case, Held, check};
use crate::dense::Dense;

/// Tensors of `shape` but for `dim`, which has one of `lengths`.
fn cat(dim: usize, shape: [usize; 2], lengths: &[usize]) -> Case {
    let shapes: Vec<[usize; 2]> = lengths
        .iter()
        .map(|&length| {
            let mut shape = shape;
            shape[dim] = length;
            shape
        })
        .collect();
    let shapes: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
    Case::new(Op::Cat { dim }, &shapes, move |operands| {
        let mut whole = operands[0].shape.clone();
        whole[dim] = operands.iter().map(|operand| operand.shape[dim]).sum();
        vec![Dense::from_fn(&whole, |index| {
            let mut index = index.to_vec();
            for operand in operands {
                match index[dim].checked_sub(operand.shape[dim]) {
                    Some(rest) => index[dim] = rest,
                    None => return operand.at(&index),
                }
            }
            panic!("a row beyond all operands")
        })]
    })
}

#[test]
fn joined_tensors_equal_one_device_whatever_is_sharded() {
    let seen = check([
        cat(0, [0, 3], &[4, 3]),
        cat(1, [2, 0], &[2, 5, 2]),
        cat(0, [0, 2], &[1, 3]),
        cat(0, [0, 2], &[0, 3]),
        cat(1, [1, 0], &[2, 2]),
    ]);
    assert!(seen.num_shard > 0 && seen.num_replicate > 0, "{seen:?}");
}

fn plan(op: &Op, operands: &[(&Placement, &[usize])]) -> (Vec<Placement>, Vec<Placement>) {
    let operands: Vec<Operand> = operands.iter().map(|&(placement, shape)| Operand { placement, shape }).collect();
    let plan = op.plan(&operands, &Shares::Equal, 2).unwrap();
    (plan.inputs, plan.outputs)
}

#[test]
fn ranks_exchange_rows_of_what_is_joined_along_the_shared_dim() {
    let shard = |lengths: [usize; 2]| Placement::shard(0, Lengths::new(lengths));
    let (inputs, outputs) = plan(&Op::Cat { dim: 0 }, &[(&shard([2, 1]), &[3, 5]), (&Placement::Local, &[5, 5])]);
    assert_eq!(inputs, [shard([3, 0]), shard([1, 4])]);
    assert_eq!(outputs, [shard([4, 4])]);
}

/// The cuts with that of the shared dim in rows of the part.
fn own_cuts(cuts: &[Option<Cut>], held: &Held) -> Vec<Option<Cut>> {
    let mut cuts = cuts.to_vec();
    if let Some((dim, rows)) = &held.rows {
        cuts[*dim] = cuts[*dim].as_ref().map(|cut| cut.within(rows));
    }
    cuts
}

/// The picked rows of each dim.
fn picked(shape: &[usize], cuts: &[Option<Cut>]) -> Vec<Vec<usize>> {
    let rows = |(&length, cut): (&usize, &Option<Cut>)| match cut {
        Some(cut) => cut.rows.clone().step_by(cut.step).collect(),
        None => (0..length).collect(),
    };
    shape.iter().zip(cuts).map(rows).collect()
}

fn narrow(shape: &[usize], cuts: Vec<Option<Cut>>) -> Case {
    Case::placed(Op::Narrow { cuts: cuts.clone(), blocked: vec![] }, &[shape], move |operands, held| {
        let rows = picked(&operands[0].shape, &own_cuts(&cuts, held));
        let shape: Vec<usize> = rows.iter().map(Vec::len).collect();
        let from = |index: &[usize]| -> Vec<usize> { rows.iter().zip(index).map(|(rows, &i)| rows[i]).collect() };
        vec![Dense::from_fn(&shape, |index| operands[0].at(&from(index)))]
    })
}

fn assign(shape: &[usize], cuts: Vec<Option<Cut>>) -> Case {
    let value: Vec<usize> = picked(shape, &cuts).iter().map(Vec::len).collect();
    Case::placed(Op::Assign { cuts: cuts.clone(), blocked: vec![] }, &[shape, &value], move |operands, held| {
        let [target, value] = operands else { panic!("two operands") };
        let rows = picked(&target.shape, &own_cuts(&cuts, held));
        vec![Dense::from_fn(&target.shape, |index| {
            let place = |(rows, i): (&Vec<usize>, &usize)| rows.iter().position(|row| row == i);
            let from: Option<Vec<usize>> = rows.iter().zip(index).map(place).collect();
            from.map_or_else(|| target.at(index), |from| value.at(&from))
        })]
    })
}

/// Each dim of each shape cut in several ways, and some two at once.
fn cuts() -> Vec<(Vec<usize>, Vec<Option<Cut>>)> {
    let cut = |rows, step| Some(Cut { rows, step });
    let mut list = vec![
        (vec![5, 4, 3], vec![cut(1..4, 1), None, cut(0..3, 2)]),
        (vec![3, 7], vec![cut(1..2, 1), cut(0..6, 3)]),
        (vec![4, 2], vec![None, None]),
    ];
    for shape in SHAPES.iter().filter(|shape| shape.len() <= 3) {
        for (dim, &length) in shape.iter().enumerate() {
            for (rows, step) in [(0..length / 2, 1), (length / 3..length, 1), (length / 4..length, 2), (0..length, 3)] {
                let mut cuts = vec![None; shape.len()];
                cuts[dim] = Some(Cut { rows, step });
                list.push((shape.to_vec(), cuts));
            }
        }
    }
    list
}

#[test]
fn rows_that_are_cut_out_equal_one_device_whatever_is_sharded() {
    let seen = check(cuts().into_iter().map(|(shape, cuts)| narrow(&shape, cuts)));
    assert!(seen.num_shard > seen.num_replicate && seen.num_replicate > 0, "{seen:?}");
}

#[test]
fn rows_that_are_replaced_equal_one_device_whatever_is_sharded() {
    let seen = check(cuts().into_iter().map(|(shape, cuts)| assign(&shape, cuts)));
    assert!(seen.num_shard > 0 && seen.num_replicate > 0, "{seen:?}");
}

#[test]
fn a_cut_of_the_shared_dim_leaves_each_rank_its_own_rows() {
    let narrow = |rows, step| Op::Narrow { cuts: vec![Some(Cut { rows, step }), None], blocked: vec![] };
    let x = Placement::shard(0, Lengths::new([4, 3]));
    let table = [(1..6, 1, [3, 2]), (0..3, 1, [3, 0]), (5..7, 1, [0, 2]), (0..7, 1, [4, 3]), (0..7, 3, [2, 1])];
    for (rows, step, lengths) in table {
        let expected = (vec![x.clone()], vec![Placement::shard(0, Lengths::new(lengths))]);
        assert_eq!(plan(&narrow(rows.clone(), step), &[(&x, &[7, 2])]), expected, "{rows:?} by {step}");
    }
    // One row, none, or rows cut in another way: the other dim.
    let beside = Placement::shard(1, Lengths::new([1, 1]));
    let moved = (vec![beside.clone()], vec![beside]);
    assert_eq!(plan(&narrow(3..4, 1), &[(&x, &[7, 2])]), moved);
    assert_eq!(plan(&narrow(3..3, 1), &[(&x, &[7, 2])]), moved);
    assert_eq!(plan(&Op::Narrow { cuts: vec![None, None], blocked: vec![0] }, &[(&x, &[7, 2])]), moved);
    let whole = (vec![Placement::Replicate], vec![Placement::Replicate]);
    assert_eq!(plan(&narrow(3..4, 1), &[(&x, &[7, 1])]), whole);
    let kept = (vec![x.clone()], vec![x.clone()]);
    let columns = Op::Narrow { cuts: vec![None, Some(Cut { rows: 0..1, step: 1 })], blocked: vec![] };
    assert_eq!(plan(&columns, &[(&x, &[7, 2])]), kept);
}

#[test]
fn the_gradient_of_a_cut_is_shared_as_what_was_cut() {
    let op = Op::Assign { cuts: vec![Some(Cut { rows: 1..6, step: 1 }), None], blocked: vec![] };
    let shard = |lengths: [usize; 2]| Placement::shard(0, Lengths::new(lengths));
    // Zeros take the shares that a batch of their length has: the gradient's rows are there already.
    let (inputs, outputs) = plan(&op, &[(&Placement::Fill, &[7, 2]), (&shard([3, 2]), &[5, 2])]);
    assert_eq!((inputs, outputs), (vec![shard([4, 3]), shard([3, 2])], vec![shard([4, 3])]));
    // A target that is shared already keeps its shares.
    let (inputs, outputs) = plan(&op, &[(&shard([1, 6]), &[7, 2]), (&shard([3, 2]), &[5, 2])]);
    assert_eq!((inputs, outputs), (vec![shard([1, 6]), shard([0, 5])], vec![shard([1, 6])]));
}
