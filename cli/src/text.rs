//! Numbers as people write them, and tables of them.

pub(crate) use vnplug_ring::text::escape;
pub(crate) use vnplug_ring::units::{duration, size};

/// As [`size`], of lengths of packets.
///
/// # Errors
/// A text that says what is allowed.
pub(crate) fn length(text: &str) -> Result<u32, String> {
    u32::try_from(size(text)?).map_err(|_| format!("{text:?} is longer than any packet"))
}

/// A number with thin groups of three digits: `12,345,678`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number of things: `1 packet`, `2,000 packets`; the plural has an s.
pub(crate) fn counted(number: u64, thing: &str) -> String {
    let s = if number == 1 { "" } else { "s" };
    format!("{} {thing}{s}", grouped(number))
}

/// Rows as text in aligned columns, two spaces apart; columns of numbers are set to the right.
pub(crate) fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
    let width = |column| {
        rows.iter()
            .map(|row| cell(row, column).chars().count())
            .max()
    };
    let widths: Vec<usize> = (0..count)
        .map(|column| width(column).unwrap_or(0))
        .collect();
    let numeric = |column| {
        let digit = |c: char| c.is_ascii_digit() || ",.".contains(c);
        let number = |text: String| text.chars().all(digit) || text == "-";
        rows.iter().skip(1).all(|row| number(cell(row, column)))
    };
    let right: Vec<bool> = (0..count).map(numeric).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for column in 0..count {
            let text = cell(row, column);
            let pad = " ".repeat(widths[column] - text.chars().count());
            line += if column > 0 { "  " } else { "" };
            line += &if right[column] {
                pad + &text
            } else {
                text + &pad
            };
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

/// As [`columns`], with a head.
pub(crate) fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head = head.iter().map(|&word| word.to_owned()).collect();
    columns(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_a_size_that_a_packet_may_have() {
        assert_eq!(
            (length("96"), length("64K"), length("0")),
            (Ok(96), Ok(65_536), Ok(0))
        );
        for text in ["", "-1", "4G", "96x"] {
            assert!(length(text).is_err(), "{text}");
        }
    }

    #[test]
    fn digits_are_grouped_from_the_right() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn one_is_singular() {
        assert_eq!(counted(1, "packet"), "1 packet");
        assert_eq!(counted(0, "packet"), "0 packets");
        assert_eq!(counted(1234, "packet"), "1,234 packets");
    }

    #[test]
    fn words_are_set_left_and_numbers_right() {
        let row = |words: [&str; 2]| words.map(str::to_owned).to_vec();
        let rows = [row(["name", "n"]), row(["a", "1,000"]), row(["long", "7"])];
        assert_eq!(columns(&rows), "name      n\na     1,000\nlong      7\n");
    }
}
