const form = document.getElementById("filter");

// A row that says nothing about a key, like a published number, is not hidden by it.
function matches(row, wanted) {
  return wanted.every(([key, value]) => !(key in row.dataset) || row.dataset[key] === value);
}

function showSection(section, filtered) {
  const rows = [...section.querySelectorAll("tr.record")];
  const left = rows.filter((row) => !row.hidden).length;
  section.hidden = filtered && left === 0;
  document.querySelector(`nav a[href="#${section.id}"]`).parentElement.hidden = section.hidden;
  const count = section.querySelector(".count");
  if (count) count.textContent = left === rows.length ? `${left}` : `${left} of ${rows.length}`;
}

function apply() {
  const wanted = [...new FormData(form)].filter(([, value]) => value !== "");
  for (const row of document.querySelectorAll("tbody tr")) row.hidden = !matches(row, wanted);
  document.querySelectorAll("section.exhibit").forEach((section) => showSection(section, wanted.length > 0));
  const folders = new Map([...document.querySelectorAll("tr.record")].map((row) => [row.dataset.record, row.hidden]));
  const left = [...folders.values()].filter((hidden) => !hidden).length;
  form.querySelector("output").textContent = `${left} of ${folders.size} records`;
}

if (form) {
  form.hidden = false;
  form.addEventListener("change", apply);
  form.addEventListener("reset", (event) => {
    event.preventDefault(); // a browser empties the fields only after this
    for (const select of form.querySelectorAll("select")) select.value = "";
    apply();
  });
  apply(); // a browser may keep a choice when the page is loaded again
}

// A closed list does not print.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((list) => (list.open = true));
});
addEventListener("afterprint", () => closed.forEach((list) => (list.open = false)));
