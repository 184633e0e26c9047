// Asks the search of the built site the questions of questions.toml: `make docs-questions`; it needs node.
//
// The search is the worker of the theme, in which a browser runs it; its results are pages, the best first.
import fs from "node:fs"

const SITE = "build/site"
const FIRST = 3  // results that a reader looks at

const workers = `${SITE}/assets/javascripts/workers`
const code = fs.readFileSync(`${workers}/${fs.readdirSync(workers).find(name => name.endsWith(".js"))}`, "utf8")
const index = JSON.parse(fs.readFileSync(`${SITE}/search/search_index.json`, "utf8"))
const questions = fs.readFileSync("docs/_site/questions.toml", "utf8")

let handler
let answered
globalThis.self = globalThis
globalThis.addEventListener = (event, listener) => { handler = listener }
globalThis.postMessage = message => answered(message)
new Function(code)()

function send(type, data) {
  return new Promise(resolve => {
    answered = resolve
    handler({data: {type, data}})
  })
}

await send(0, {...index, options: {suggest: true}})
const count = {asked: 0, found: 0}
for (const [, typed, pages] of questions.matchAll(/^typed = "(.*)"\nasked = .*\nanswered_by = \[(.*)\]$/gm)) {
  const result = await send(2, typed)
  const places = result.data.items.map(group => group[0].location)
  const wanted = [...pages.matchAll(/"(.*?)\.md"/g)].map(found => `${found[1]}.html`)
  const found = places.slice(0, FIRST).some(place => wanted.includes(place.split("#")[0]))
  count.asked += 1
  count.found += found
  console.log(`${found ? "found  " : "MISSING"}  ${typed.padEnd(38)}  ${places.slice(0, FIRST).join("  ")}`)
}
console.log(`${count.found} of ${count.asked} questions are answered by one of the first ${FIRST} results`)
process.exitCode = count.found === count.asked ? 0 : 1
