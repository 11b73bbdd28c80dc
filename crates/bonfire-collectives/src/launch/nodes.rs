//! Slurm's lists of nodes, as `login1,node[03-05,7]`.

/// The first node of a list; nothing for a list that is malformed.
pub(super) fn first_node(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        name.push_str(&rest[..end]);
        match rest[end..].chars().next() {
            Some('[') => {
                let (ranges, behind) = rest[end + 1..].split_once(']')?;
                name.push_str(first_number(ranges)?);
                rest = behind;
            }
            Some(']') => return None,
            // A comma, or the end of the list.
            _ => break,
        }
    }
    (!name.is_empty() && !name.contains(char::is_whitespace)).then_some(name)
}

/// The first number of `03-05,7`, with its zeros.
fn first_number(ranges: &str) -> Option<&str> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut first = None;
    for range in ranges.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        if !is_number(low) || !is_number(high) {
            return None;
        }
        first = first.or(Some(low));
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_node_of_a_list_is_found() {
        for (list, node) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[03-05,7]", "node03"),
            ("node[7]", "node7"),
            ("node[10,3-5]", "node10"),
            ("login,node[1-2]", "login"),
            ("rack[1-2]n[003-004]", "rack1n003"),
            ("gpu-[1-2].cluster.example", "gpu-1.cluster.example"),
            ("n[1-2],m[3-4]", "n1"),
            (" node1 ", "node1"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(node), "{list}");
        }
    }

    #[test]
    fn a_malformed_list_has_no_first_node() {
        for list in
            ["", ",", "node[", "node]", "node[]", "node[a-b]", "node[1-]", "node[1,,2]", "[", "a b", "node[[1]]"]
        {
            assert_eq!(first_node(list), None, "{list}");
        }
    }
}
